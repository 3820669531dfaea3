"""Causal attention by blocks of queries, for half precision on a CPU.

Owns the forward and the backward pass. Refuses to know projections, heads' origin and when it pays: PyTorch's own CPU
kernel multiplies half-precision operands at about the speed of fp32, while plain batched products reach the machine's.
A block of queries meets the keys up to its own last position only, so most of the upper triangle is never computed.
Source: the blocking over queries of Dao et al. 2022, "FlashAttention"; the probabilities are kept, not recomputed.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SMALLEST_BLOCK = 64
MOST_BLOCKS = 4
"""More blocks save fewer products than the smaller ones lose: measured at T = 64, 256 and 1024."""


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, dropout: float) -> Tensor:
    """Attend as `scaled_dot_product_attention` does: three (B, H, T, D) -> (B, H, T, D).

    `visible` (B, 1, T, T) bool says which key each query may see, never a later one; None for every one that is not
    later. `dropout` is drawn from the process's generator.
    """
    mixed: Tensor = _BlockedAttention.apply(query, key, value, visible, dropout)  # type: ignore[no-untyped-call]
    return mixed


class _BlockedAttention(torch.autograd.Function):
    """Keeps the probabilities of each block for the backward pass, at two bytes each."""

    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, dropout: float
    ) -> Tensor:
        mixed = torch.empty_like(query)
        kept: list[Tensor] = []
        with torch.autocast(query.device.type, enabled=False):
            for begin, end in _blocks(query.shape[2]):
                weights = _weights(_flat(query, begin, end), _flat(key, 0, end), visible, begin, end)
                kept.append(weights)
                if dropout:
                    weights, survives = torch.native_dropout(weights, dropout, train=True)
                    kept.append(survives)
                block = torch.bmm(weights, _flat(value, 0, end))  # (BH, t, S) x (BH, S, D) -> (BH, t, D)
                mixed[:, :, begin:end] = block.view(*query.shape[:2], end - begin, -1)  # (BH, t, D) -> (B, H, t, D)
        context.dropout = dropout
        context.save_for_backward(query, key, value, *kept)
        return mixed

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = context.saved_tensors
        scale, dropout, each = query.shape[3] ** -0.5, context.dropout, 2 if context.dropout else 1
        of_query, of_key, of_value = (torch.zeros_like(tensor).flatten(0, 1) for tensor in (query, key, value))
        for number, (begin, end) in enumerate(_blocks(query.shape[2])):
            weights, block = kept[number * each], _flat(gradient, begin, end)  # (BH, t, S), (BH, t, D)
            survives = kept[number * each + 1] if dropout else None
            dropped = weights if survives is None else weights * survives / (1.0 - dropout)
            of_value[:, :end] += torch.bmm(dropped.mT, block)  # (BH, S, t) x (BH, t, D) -> (BH, S, D)
            of_weights = torch.bmm(block, _flat(value, 0, end).mT)  # (BH, t, D) x (BH, D, S) -> (BH, t, S)
            if survives is not None:
                of_weights = of_weights * survives / (1.0 - dropout)
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            of_query[:, begin:end] = torch.bmm(of_scores, _flat(key, 0, end)).mul_(scale)
            of_key[:, :end] += torch.bmm(of_scores.mT, _flat(query, begin, end)).mul_(scale)
        shaped = (tensor.view(query.shape) for tensor in (of_query, of_key, of_value))  # (BH, T, D) -> (B, H, T, D)
        return *shaped, None, None


def _blocks(time: int) -> Iterator[tuple[int, int]]:
    size = max(SMALLEST_BLOCK, -(-time // MOST_BLOCKS))
    return ((begin, min(begin + size, time)) for begin in range(0, time, size))


def _flat(tensor: Tensor, begin: int, end: int) -> Tensor:
    return tensor[:, :, begin:end].flatten(0, 1)  # (B, H, T, D) -> (BH, t, D)


def _weights(query: Tensor, key: Tensor, visible: Tensor | None, begin: int, end: int) -> Tensor:
    # beta=0 ignores the first argument: what is wanted is a product scaled before it is rounded.
    scores = torch.baddbmm(query.new_empty(1), query, key.mT, beta=0.0, alpha=query.shape[2] ** -0.5)  # (BH, t, S)
    if visible is None:
        later = torch.ones(end - begin, end - begin, dtype=torch.bool, device=query.device).triu(1)
        scores[:, :, begin:].masked_fill_(later, -torch.inf)
    else:
        part = visible[:, :, begin:end, :end]  # (B, 1, t, S)
        scores.view(part.shape[0], -1, *part.shape[2:]).masked_fill_(~part, -torch.inf)  # (BH, t, S) -> (B, H, t, S)
    return scores.softmax(dim=-1)
