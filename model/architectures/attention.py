"""Causal self-attention: any number of key-value heads, places learned elsewhere or given by rotation, and its cache.

Sources: Vaswani et al. 2017, "Attention Is All You Need"; Ainslie et al. 2023, "GQA"; Su et al. 2021, "RoFormer";
Henry et al. 2020, "Query-Key Normalization"; Pope et al. 2022, "Efficiently Scaling Transformer Inference", 2.1; Dao
2023, "FlashAttention-2" (documents of different lengths).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.model.configuration.network import ModelConfig
from cairn.model.kernels.block_sizes import fits_flash


class KeyValueCache:
    """Keys and values of a text's first `length` tokens; positions are absolute: another beginning needs `length` 0."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        shape = (2, config.n_layer, 1, config.n_kv_head, config.block_size, config.head_size)
        self._keys, self._values = torch.zeros(shape, device=device, dtype=dtype)  # each (L, 1, K, T, D)
        self._tokens = torch.zeros((1, config.block_size), device=device, dtype=torch.int64)
        self.length = 0

    def begin(self, tokens: Tensor) -> Tensor:
        """Add the ids (1, T) and return all, (1, length); every layer then appends their keys and values."""
        self._tokens[:, self.length : self.length + tokens.shape[1]] = tokens
        self.length += tokens.shape[1]
        return self._tokens[:, : self.length]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values of the newest ids, each (1, K, T, D); return all, (1, K, length, D)."""
        newest = slice(self.length - key.shape[2], self.length)
        self._keys[layer, :, :, newest], self._values[layer, :, :, newest] = key, value
        return self._keys[layer, :, :, : self.length], self._values[layer, :, :, : self.length]


def rotations(config: ModelConfig, begin: int, time: int, device: torch.device) -> Tensor | None:
    """Return cosines and sines for positions from `begin` on, fp32 (2, T, 1, D/2); None for learned positions."""
    if config.positions != "rotary":
        return None
    pairs = torch.arange(0, config.head_size, 2, device=device, dtype=torch.float32)  # (D/2,)
    frequencies = 1.0 / config.rotary_base ** (pairs / config.head_size)
    places = torch.arange(begin, begin + time, device=device, dtype=torch.float32)  # (T,)
    angles = torch.outer(places, frequencies)[:, None]  # (T, 1, D/2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, turned: Tensor) -> Tensor:
    """Turn each pair of numbers, of which one is in either half of the head: fp32 (B, T, H, D) -> (B, T, H, D)."""
    cosine, sine = turned
    left, right = x.chunk(2, dim=-1)  # (B, T, H, D) -> 2 x (B, T, H, D/2)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.head_size = config.n_head, config.head_size
        self.groups = config.n_head // config.n_kv_head
        """Heads that share their keys and values."""
        self.dropout = config.dropout
        self.widths = (config.attention_width, config.key_width, config.key_width)
        self.c_attn = nn.Linear(config.n_embd, sum(self.widths), bias=config.bias)
        self.c_proj = nn.Linear(config.attention_width, config.n_embd, bias=config.bias)
        norm = (config.head_size, config.norm_epsilon, config.norm_gain)
        self.q_norm, self.k_norm = (nn.RMSNorm(*norm) if config.qk_norm else None for _ in range(2))

    def forward(
        self,
        x: Tensor,
        visible: Tensor | None = None,
        cache: KeyValueCache | None = None,
        layer: int = 0,
        turned: Tensor | None = None,
    ) -> Tensor:
        """Attend: (B, T, C) -> (B, T, C); `visible` (B, 1, T, S) marks each query's keys, None is plain causal.

        The keys are those of `x`, S = T; with `cache` (B = 1) those of all cached positions, the newest T being `x`.
        `visible` may also be the `document_starts` of the batch. `turned` are the `rotations` of these positions.
        """
        query, key, value = (
            part.unflatten(2, (-1, self.head_size))  # (B, T, H D) -> (B, T, H, D), of keys and values (B, T, K, D)
            for part in self.c_attn(x).split(self.widths, dim=2)  # (B, T, (H + 2K) D) -> 3 parts
        )
        query, key = _placed(query, self.q_norm, turned), _placed(key, self.k_norm, turned)
        dropout = self.dropout if self.training else 0.0
        if visible is not None and visible.ndim == 1:
            key, value = (self._for_each_head(part, dim=2) for part in (key, value))
            joined = attend_documents(query, key, value, visible, dropout).flatten(2)  # (B, T, H, D) -> (B, T, H D)
            return F.dropout(self.c_proj(joined), self.dropout, self.training)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # (B, T, H, D) -> (B, H, T, D)
        if cache is not None:
            key, value = cache.append(layer, key, value)  # (1, K, T, D) -> (1, K, S, D)
        causal = visible is None and query.shape[2] == key.shape[2]  # a single new query sees every key
        key, value = (self._for_each_head(part, dim=1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, visible, dropout, is_causal=causal)
        joined = mixed.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H D)
        return F.dropout(self.c_proj(joined), self.dropout, self.training)

    def _for_each_head(self, x: Tensor, *, dim: int) -> Tensor:
        return x if self.groups == 1 else x.repeat_interleave(self.groups, dim=dim)  # K -> H


def _placed(x: Tensor, norm: nn.RMSNorm | None, turned: Tensor | None) -> Tensor:
    """Normalise and turn queries or keys (B, T, H, D), in fp32 whatever their precision."""
    if norm is None and turned is None:
        return x
    exact = x.float()
    if norm is not None:
        gain = None if norm.weight is None else norm.weight.float()  # sharded processes gather it in half precision
        exact = F.rms_norm(exact, norm.normalized_shape, gain, norm.eps)
    return (exact if turned is None else rotate(exact, turned)).to(x.dtype)


def document_starts(tokens: Tensor, boundary_id: int) -> Tensor:
    """Return where documents begin, at rows and ends of text, and the end: ids (B, T) -> int32 (documents + 1,)."""
    begins = tokens == boundary_id  # (B, T)
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0]  # (B, T) -> (documents,)
    return F.pad(starts, (0, 1), value=tokens.numel()).to(torch.int32)


def takes_starts(device: torch.device, dtype: torch.dtype | None, head_width: int) -> bool:
    """Whether `attend_documents` can attend on this device, in this precision of autocast, None for fp32."""
    if device.type != "cuda" or dtype is None or not fits_flash(head_width):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def attend_documents(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, dropout: float) -> Tensor:
    """Attend causally within documents on CUDA: 3 x half (B, T, H, C/H), int32 (documents + 1,) -> (B, T, H, C/H).

    Of the deterministic kernels there only PyTorch's math kernel takes a mask of T x T, and it keeps all probabilities.
    Flash attention takes the documents' bounds, and has a deterministic backward pass, which `determinism` asks for.
    `torch.nn.attention.varlen` calls the same operator, but leaves out dropout.
    """
    time = query.shape[1]  # an upper bound of a document's length that the host knows without waiting
    parts = (part.flatten(0, 1) for part in (query, key, value))  # (B, T, H, C/H) -> (BT, H, C/H)
    mixed: Tensor = torch.ops.aten._flash_attention_forward(*parts, starts, starts, time, time, dropout, True, False)[0]
    return mixed.view(query.shape)  # (BT, H, C/H) -> (B, T, H, C/H)
