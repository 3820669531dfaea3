"""Cache of every layer's keys and values while a text is generated.

Positions are absolute, so a context that starts at another token needs an empty cache.
Source: Pope et al. 2022, "Efficiently Scaling Transformer Inference", section 2.1.
"""

import torch
from torch import Tensor

from model.configuration.network import ModelConfig


class KeyValueCache:
    """Keys and values of the first `length` tokens of one text, at most block_size."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        shape = (2, config.n_layer, 1, config.n_head, config.block_size, config.n_embd // config.n_head)
        self._keys, self._values = torch.zeros(shape, device=device, dtype=dtype)  # each (L, 1, H, T, C/H)
        self._tokens = torch.zeros((1, config.block_size), device=device, dtype=torch.int64)
        self.length = 0

    @property
    def tokens(self) -> Tensor:
        """The cached ids, (1, length)."""
        return self._tokens[:, : self.length]

    def begin(self, tokens: Tensor) -> None:
        """Add the ids (1, T); every layer then appends their keys and values."""
        self._tokens[:, self.length : self.length + tokens.shape[1]] = tokens
        self.length += tokens.shape[1]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values of the newest ids, each (1, H, T, C/H); return all, (1, H, length, C/H)."""
        newest = slice(self.length - key.shape[2], self.length)
        self._keys[layer, :, :, newest], self._values[layer, :, :, newest] = key, value
        return self._keys[layer, :, :, : self.length], self._values[layer, :, :, : self.length]

    def forget(self) -> None:
        """Empty the cache; its memory is reused."""
        self.length = 0
