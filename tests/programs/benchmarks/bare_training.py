"""What the benchmarks hold against Cairn: a plain PyTorch script, its data memory-mapped, nothing recorded.

`python bare_training.py SHARD CHECKPOINT [--continue]` takes one step with the quickstart's shapes and saves its state.
Imports nothing of this project.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS, BLOCK, BATCH = 1024, 128, 4, 4, 128, 32
HEADER_BYTES = 4096


class Network(nn.Module):
    """A causal transformer out of PyTorch's own parts."""

    def __init__(self) -> None:
        """Make the parts."""
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.mask = nn.Transformer.generate_square_subsequent_mask(BLOCK)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, V) for ids (B, T)."""
        hidden = self.tokens(ids) + self.places(torch.arange(BLOCK))
        logits: torch.Tensor = self.body(hidden, mask=self.mask, is_causal=True) @ self.tokens.weight.T
        return logits


def main() -> None:
    """Take one step and say so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shard", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--continue", dest="resumed", action="store_true")
    given = parser.parse_args()
    words = np.memmap(given.shard, dtype=np.uint16, mode="r", offset=HEADER_BYTES)
    torch.manual_seed(1)
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    if given.resumed:
        state = torch.load(given.checkpoint)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
    begins = torch.randint(len(words) - BLOCK - 1, (BATCH,)).tolist()
    rows = torch.stack([torch.from_numpy(words[i : i + BLOCK + 1].astype(np.int64)) for i in begins]) % VOCABULARY
    logits = network(rows[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    print(f"step 1 · loss {loss.item():.3f}", flush=True)
    if not given.resumed:
        torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, given.checkpoint)


if __name__ == "__main__":
    main()
