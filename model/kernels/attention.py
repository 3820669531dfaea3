"""Causal self-attention: any number of key-value heads, places learned elsewhere or given by rotation, and its cache.

For half precision on a CPU it goes by blocks of queries, forward and backward: PyTorch's own kernel multiplies it at
the speed of fp32, plain batched products use the hardware. Its dropout, a mask of bits, is several times cheaper than
PyTorch's; the drop probability is rounded to 1/32768.
Sources: Vaswani et al. 2017, "Attention Is All You Need"; Ainslie et al. 2023, "GQA"; Su et al. 2021, "RoFormer";
Henry et al. 2020, "Query-Key Normalization"; Pope et al. 2022, "Efficiently Scaling Transformer Inference", 2.1; Dao
2023, "FlashAttention-2" (documents of different lengths); query blocks of Dao et al. 2022, "FlashAttention", whose
probabilities are saved here; Srivastava et al. 2014, "Dropout" (survivors are scaled by the inverse of their share).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.model.configuration.network import ModelConfig
from cairn.model.kernels.block_sizes import fits_flash, query_blocks


class KeyValueCache:
    """Keys and values of a text's first `length` tokens; positions are absolute: another beginning needs `length` 0."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        shape = (2, config.n_layer, 1, config.n_kv_head, config.block_size, config.head_size)
        self._keys, self._values = torch.zeros(shape, device=device, dtype=dtype)  # each (L, 1, K, T, D)
        self._tokens = torch.zeros((1, config.block_size), device=device, dtype=torch.int64)
        self.length, self._layer = 0, 0

    def begin(self, tokens: Tensor) -> Tensor:
        """Add the ids (1, T) and return all, (1, length); each layer in turn then appends their keys and values."""
        self._layer = 0
        self._tokens[:, self.length : self.length + tokens.shape[1]] = tokens
        self.length += tokens.shape[1]
        return self._tokens[:, : self.length]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the next layer's keys and values of the newest ids, (1, K, T, D); return all of it, (1, K, length, D)."""
        layer, newest = self._layer, slice(self.length - key.shape[2], self.length)
        self._layer += 1
        self._keys[layer, :, :, newest], self._values[layer, :, :, newest] = key, value
        return self._keys[layer, :, :, : self.length], self._values[layer, :, :, : self.length]


def rotations(config: ModelConfig, begin: int, time: int, device: torch.device) -> Tensor | None:
    """Return cosines and sines for positions from `begin` on, fp32 (2, T, 1, D/2); None for learned positions."""
    if config.positions != "rotary":
        return None
    pairs = torch.arange(0, config.head_size, 2, device=device, dtype=torch.float32)  # (D/2,)
    frequencies = 1.0 / config.rotary_base ** (pairs / config.head_size)
    if config.rotary_scaling is not None:
        factor, *llama = config.rotary_scaling
        kept = torch.zeros(())
        if llama:  # frequencies that turn `high` times in the first positions are kept, others divided, or in part
            low, high, positions = llama
            kept = ((positions / (2 * math.pi / frequencies) - low) / (high - low)).clamp(0.0, 1.0)  # (D/2,)
        frequencies = (1 - kept) * frequencies / factor + kept * frequencies
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
        self, x: Tensor, visible: Tensor | None = None, cache: KeyValueCache | None = None, turned: Tensor | None = None
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
            mixed = attend_documents(query, key, value, visible, dropout)  # (B, T, H, D)
        else:
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # (B, T, H, D) -> (B, H, T, D)
            if cache is not None:
                key, value = cache.append(key, value)  # (1, K, T, D) -> (1, K, S, D)
            causal = visible is None and query.shape[2] == key.shape[2]  # a single new query sees every key
            gqa = self.groups > 1 and x.device.type == "cuda"  # flash attention itself, in equal bits and less memory
            if self.groups > 1 and not gqa:
                key, value = (part.repeat_interleave(self.groups, dim=1) for part in (key, value))  # K -> H
            mixed = F.scaled_dot_product_attention(query, key, value, visible, dropout, causal, enable_gqa=gqa)
            mixed = mixed.transpose(1, 2)  # (B, H, T, D) -> (B, T, H, D)
        return F.dropout(self.c_proj(mixed.flatten(2)), self.dropout, self.training)  # (B, T, H D) -> (B, T, C)


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
    """Attend causally within documents on CUDA: half (B, T, H, D), 2 x (B, T, K, D), int32 (documents + 1,) -> query's.

    Of the deterministic kernels there only PyTorch's math kernel takes a mask of T x T, and it keeps all probabilities.
    Flash attention takes the documents' bounds, and has a deterministic backward pass, which `determinism` asks for.
    `torch.nn.attention.varlen` calls the same operator, but leaves out dropout.
    """
    time = query.shape[1]  # an upper bound of a document's length that the host knows without waiting
    parts = (part.flatten(0, 1) for part in (query, key, value))  # (B, T, H, D) -> (BT, H, D)
    mixed: Tensor = torch.ops.aten._flash_attention_forward(*parts, starts, starts, time, time, dropout, True, False)[0]
    return mixed.view(query.shape)  # (BT, H, D) -> (B, T, H, D)


_LEVELS = 2**15
_MASKS_PER_DRAW = 4
"""16-bit masks in one random int64."""


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """Saved for the backward pass: queries, keys and values (3, BH, T, D), each block's probabilities and dropout."""

    heads: Tensor
    weights: tuple[Tensor, ...]
    keep_masks: tuple[Tensor, ...]


def attend(joint: Tensor, heads: int, visible: Tensor | None, dropout: float) -> tuple[Tensor, SavedAttention]:
    """Compute `scaled_dot_product_attention` of queries, keys and values side by side: (B, T, 3C) -> (B, T, C).

    `visible` (B, 1, T, T) bool marks keys up to each query, None all; dropout draws from the process's generator.
    """
    batch, time, width = joint.shape[0], joint.shape[1], joint.shape[2] // 3
    split = joint.view(batch, time, 3, heads, width // heads).permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
    query, key, value = parts = split.reshape(3, batch * heads, time, -1)  # (3, BH, T, D)
    mixed = joint.new_empty(batch, time, heads, width // heads)  # (B, T, H, D)
    weights, keep_masks = [], []
    for begin, end in query_blocks(time):
        block = _scores(query[:, begin:end], key[:, :end], visible, begin, end).softmax(dim=-1)
        weights.append(block)
        if dropout:
            keep_masks.append(draw_keep_mask(block.shape, dropout))
            block = apply_keep_mask(block, keep_masks[-1], dropout)
        part = torch.bmm(block, value[:, :end])  # (BH, t, S) x (BH, S, D) -> (BH, t, D)
        mixed[:, begin:end] = part.view(batch, heads, end - begin, -1).transpose(1, 2)  # -> (B, t, H, D)
    saved = SavedAttention(parts, tuple(weights), tuple(keep_masks))
    return mixed.view(batch, time, width), saved  # (B, T, H, D) -> (B, T, C)


def attend_backward(gradient: Tensor, saved: SavedAttention, dropout: float) -> Tensor:
    """Return the gradient of `attend`'s input (B, T, 3C) from the gradient of its result (B, T, C)."""
    batch, time, width = gradient.shape
    query, key, value = saved.heads
    depth = query.shape[2]
    by_head = gradient.view(batch, time, -1, depth).transpose(1, 2)  # (B, T, C) -> (B, H, T, D)
    incoming = by_head.reshape(query.shape)  # (B, H, T, D) -> (BH, T, D)
    grad_heads = torch.empty_like(saved.heads)
    grad_query, grad_key, grad_value = grad_heads
    for number, (begin, end) in reversed(list(enumerate(query_blocks(time)))):
        weights, block = saved.weights[number], incoming[:, begin:end]  # (BH, t, S), (BH, t, D)
        grad_weights = torch.bmm(block, value[:, :end].mT)  # (BH, t, D) x (BH, D, S) -> (BH, t, S)
        dropped = weights
        if dropout:
            dropped = apply_keep_mask(weights, saved.keep_masks[number], dropout)
            grad_weights = apply_keep_mask(grad_weights, saved.keep_masks[number], dropout)
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_query[:, begin:end] = torch.bmm(grad_scores, key[:, :end])  # (BH, t, S) x (BH, S, D) -> (BH, t, D)
        for total, part in (
            (grad_value, torch.bmm(dropped.mT, block)),  # (BH, S, t) x (BH, t, D) -> (BH, S, D)
            (grad_key, torch.bmm(grad_scores.mT, query[:, begin:end])),
        ):
            # The last block runs first and covers every key: the other blocks add to its result.
            total.copy_(part) if end == time else total[:, :end].add_(part)
    grad_heads[:2].mul_(depth**-0.5)
    joint = grad_heads.view(3, batch, -1, time, depth).permute(1, 3, 0, 2, 4)  # (3, BH, T, D) -> (B, T, 3, H, D)
    return joint.reshape(batch, time, 3 * width)  # (B, T, 3, H, D) -> (B, T, 3C)


def _scores(query: Tensor, key: Tensor, visible: Tensor | None, begin: int, end: int) -> Tensor:
    scale = query.shape[2] ** -0.5
    if visible is None:
        hidden = query.new_full((end - begin, end), -torch.inf).triu_(begin + 1)  # (t, S): 0 where a key is seen
        return torch.baddbmm(hidden, query, key.mT, alpha=scale)  # (BH, t, D) x (BH, D, S) -> (BH, t, S)
    # beta=0 ignores the first argument: this form scales the product before rounding it.
    scores = torch.baddbmm(query.new_empty(1), query, key.mT, beta=0.0, alpha=scale)  # (BH, t, S)
    part = visible[:, :, begin:end, :end]  # (B, 1, t, S)
    scores.view(part.shape[0], -1, *part.shape[2:]).masked_fill_(~part, -torch.inf)  # (BH, t, S) -> (B, H, t, S)
    return scores


def draw_keep_mask(shape: Sequence[int], dropout: float) -> Tensor:
    """Draw an int16 mask from the process's generator: all bits set where a number is kept, else none."""
    size = torch.Size(shape)
    drawn = torch.empty(-(-size.numel() // _MASKS_PER_DRAW), dtype=torch.int64).random_(-(2**63), None)
    bits = drawn.view(torch.int16)[: size.numel()].view(size)
    # 15 random bits from -2^14 on: values below the threshold become negative, and the sign fills all 16 bits.
    return bits.bitwise_right_shift_(1).sub_(_kept_levels(dropout) - _LEVELS // 2).bitwise_right_shift_(15)


def apply_keep_mask(tensor: Tensor, keep: Tensor, dropout: float) -> Tensor:
    """Return `tensor` (16 bits a number) with dropped numbers set to 0 and the others scaled up."""
    kept = (tensor.view(torch.int16) & keep).view(tensor.dtype)
    return kept.mul_(_LEVELS / _kept_levels(dropout))


def _kept_levels(dropout: float) -> int:
    return max(1, round((1.0 - dropout) * _LEVELS))
