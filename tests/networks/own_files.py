"""Networks of one's own that tests train: as files by name, and as the builder of nanoGPT's unchanged file."""

from pathlib import Path

NANOGPT, NANO = (Path(__file__).with_name(f"{name}.py.txt") for name in ("nanogpt_model", "nano"))
"""nanoGPT's model.py at its commit 3adf61e1, unchanged, whose licence (MIT) lies beside it; and a builder for it."""


def nanogpt() -> dict[str, bytes]:
    """Return nanoGPT's file and the builder, by name."""
    return {"model.py": NANOGPT.read_bytes(), "nano.py": NANO.read_bytes()}


def layers(body: str = "", forward: str = "", made: str = "") -> dict[str, bytes]:
    """Return a file of a small causal network; with more lines in its `__init__`, its `forward` and its `build`."""
    text = f"""
import random
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab_size, n_embd, dropout):
        super().__init__()
        self.table = nn.Embedding(vocab_size, n_embd)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(n_embd, n_embd), nn.GELU()) for _ in range(2))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(n_embd, vocab_size)
        {body}

    def forward(self, ids):
        x = self.drop(self.table(ids))
        x = x + x.cumsum(1) / 8
        for block in self.blocks:
            x = x + block(x)
        {forward}
        return self.head(x)


def build(vocab_size: int, n_embd: int = 8, n_layer: int = 1, n_head: int = 1, dropout: float = 0.0):
    network = Net(vocab_size, n_embd, dropout)
    {made}
    return network
"""
    return {"net.py": text.encode()}
