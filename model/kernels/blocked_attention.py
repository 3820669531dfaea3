"""Causal attention by blocks of queries for half precision on a CPU, forward and backward.

PyTorch's own CPU kernel multiplies half precision at the speed of fp32; plain batched products use the hardware.
Its dropout, a mask of bits, is several times cheaper than PyTorch's; the drop probability is rounded to 1/32768.
Sources: query blocks of Dao et al. 2022, "FlashAttention"; the probabilities are saved, not recomputed; Srivastava et
al. 2014, "Dropout" (survivors are scaled by the inverse of their share).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.model.kernels.block_sizes import query_blocks

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
