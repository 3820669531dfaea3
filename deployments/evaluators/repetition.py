"""How much a model repeats itself, written by it from its own start: an evaluator of one's own in one file.

Gets a model directory in Hugging Face layout, prints one JSON object of numbers. Needs only what Cairn itself needs:
the directory is read back with safetensors and tokenizers, without `transformers`.

Greedy text of a model that has learned little goes in circles. `distinct_2` is the share of its pairs of tokens that
are different ones (Li et al. 2016), `loop` the share of tokens that lie in a copy of what stood right before them.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

TOKENS = 128
TEXTS = 4


class DirectoryModel:
    """GPT-2 as its directory describes it, computed plainly: enough to write a little text."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if self.config["model_type"] != "gpt2":
            sys.exit(f"repetition.py computes GPT-2 alone, and this model is {self.config['model_type']}")
        self.weights = load_file(folder / "model.safetensors")

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits after the last of `ids` (T)."""
        ids = ids[-self.config["n_positions"] :]
        x = self.weights["transformer.wte.weight"][ids] + self.weights["transformer.wpe.weight"][: len(ids)]
        for layer in range(self.config["n_layer"]):
            x = self.block(x, f"transformer.h.{layer}")
        return self.norm(x[-1:], "transformer.ln_f")[0] @ self.weights["transformer.wte.weight"].T

    def block(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """One block: attention, then the feed-forward net, each beside a residual."""
        tokens, width = x.shape
        heads = self.config["n_head"]
        qkv = self.linear(self.norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
        q, k, v = (part.view(tokens, heads, width // heads).transpose(0, 1) for part in qkv.split(width, dim=1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linear(attended.transpose(0, 1).reshape(tokens, width), f"{name}.attn.c_proj")
        hidden = self.linear(self.norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
        return x + self.linear(torch.nn.functional.gelu(hidden, approximate="tanh"), f"{name}.mlp.c_proj")

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """GPT-2 stores its linear maps transposed."""
        return x @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Layer norm over the width."""
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, self.config["layer_norm_epsilon"])


def write_greedily(model: DirectoryModel, begin: int) -> list[int]:
    """Return the token and the likeliest ones after it."""
    ids = [begin]
    for _ in range(TOKENS):
        ids.append(int(model.logits(torch.tensor(ids)).argmax()))
    return ids


def loop_share(ids: list[int], longest: int = 16) -> float:
    """Return the share of tokens that lie in a copy of the up to `longest` tokens right before them."""
    copied = [False] * len(ids)
    for length in range(1, longest + 1):
        for end in range(2 * length, len(ids) + 1):
            if ids[end - length : end] == ids[end - 2 * length : end - length]:
                copied[end - length : end] = [True] * length
    return sum(copied) / len(ids)


def main() -> None:
    """Print the numbers of the model in the folder that is named last."""
    model = DirectoryModel(Path(sys.argv[-1]))
    first = model.logits(torch.tensor([model.config["eos_token_id"]]))
    begins = first.topk(min(TEXTS, len(first))).indices.tolist()
    with torch.inference_mode():
        texts = [write_greedily(model, begin) for begin in begins]
    pairs = [set(pairwise(ids)) for ids in texts]
    numbers = {
        "distinct_2": sum(len(found) for found in pairs) / sum(len(ids) - 1 for ids in texts),
        "loop": sum(loop_share(ids) for ids in texts) / len(texts),
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
