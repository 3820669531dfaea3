"""What attention remembers of a text while it grows: the keys and values of every layer, computed once.

Owns the memory and its layout. Refuses to know the network, what is drawn, and what to forget: positions are learned
and absolute, so keys are right only at the positions they were computed at, and a context that begins elsewhere begins
an empty cache. Source: Pope et al. 2022, "Efficiently Scaling Transformer Inference", section 2.1.
"""

import torch
from torch import Tensor

from model.configuration.network import ModelConfig


class KeyValueCache:
    """Keys and values of the first `length` tokens of one text, for at most block_size tokens."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Reserve the memory for a whole block: 2 x n_layer x block_size x n_embd numbers."""
        shape = (2, config.n_layer, 1, config.n_head, config.block_size, config.n_embd // config.n_head)
        self._keys, self._values = torch.zeros(shape, device=device, dtype=dtype)  # each (L, 1, H, T, C/H)
        self._tokens = torch.zeros((1, config.block_size), device=device, dtype=torch.int64)
        self.length = 0

    @property
    def tokens(self) -> Tensor:
        """The ids remembered, (1, length)."""
        return self._tokens[:, : self.length]

    def begin(self, tokens: Tensor) -> None:
        """Take in the ids (1, T) that every layer is about to `append` keys and values for."""
        self._tokens[:, self.length : self.length + tokens.shape[1]] = tokens
        self.length += tokens.shape[1]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a layer's keys and values of the newest ids, each (1, H, T, C/H); return all, (1, H, length, C/H)."""
        newest = slice(self.length - key.shape[2], self.length)
        self._keys[layer, :, :, newest], self._values[layer, :, :, newest] = key, value
        return self._keys[layer, :, :, : self.length], self._values[layer, :, :, : self.length]

    def forget(self) -> None:
        """Begin an empty text in the same memory."""
        self.length = 0
