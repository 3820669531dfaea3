"""Causal attention by blocks of queries, for half precision on a CPU.

Owns the forward and the backward pass. Refuses to know projections, autograd and when it pays: PyTorch's own CPU
kernel multiplies half-precision operands at about the speed of fp32, while plain batched products reach the machine's.
A block of queries meets the keys up to its own last position only, so most of the upper triangle is never computed.
Source: the blocking over queries of Dao et al. 2022, "FlashAttention"; the probabilities are kept, not recomputed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.kernels.block_sizes import query_blocks
from model.kernels.dropout_bits import draw_survivors, drop


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What the backward pass needs: queries, keys and values (3, BH, T, D), and for each block its probabilities.

    `survivors` are the blocks' dropout bits, none without dropout.
    """

    heads: Tensor
    weights: tuple[Tensor, ...]
    survivors: tuple[Tensor, ...]


def attend(joint: Tensor, heads: int, visible: Tensor | None, dropout: float) -> tuple[Tensor, Kept]:
    """Attend as `scaled_dot_product_attention` does: queries, keys and values side by side (B, T, 3C) -> (B, T, C).

    `visible` (B, 1, T, T) bool says which key each query may see, never a later one; None for every one that is not
    later. `dropout` is drawn from the process's generator.
    """
    batch, time, width = joint.shape[0], joint.shape[1], joint.shape[2] // 3
    apart = joint.view(batch, time, 3, heads, width // heads).permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
    query, key, value = parts = apart.reshape(3, batch * heads, time, -1)  # (3, BH, T, D)
    mixed = joint.new_empty(batch, time, heads, width // heads)  # (B, T, H, D)
    weights, survivors = [], []
    for begin, end in query_blocks(time):
        scores = _scores(query[:, begin:end], key[:, :end], visible, begin, end)
        block = scores.softmax(dim=-1)
        weights.append(block)
        if dropout:
            survivors.append(draw_survivors(block.shape, dropout))
            block = drop(block, survivors[-1], dropout)
        found = torch.bmm(block, value[:, :end])  # (BH, t, S) x (BH, S, D) -> (BH, t, D)
        mixed[:, begin:end] = found.view(batch, heads, end - begin, -1).transpose(1, 2)  # -> (B, t, H, D)
    kept = Kept(heads=parts, weights=tuple(weights), survivors=tuple(survivors))
    return mixed.view(batch, time, width), kept  # (B, T, H, D) -> (B, T, C)


def attend_backward(gradient: Tensor, kept: Kept, dropout: float) -> Tensor:
    """Return the gradient of queries, keys and values side by side (B, T, 3C) from that of what was mixed (B, T, C)."""
    batch, time, width = gradient.shape
    query, key, value = kept.heads
    depth = query.shape[2]
    split = gradient.view(batch, time, -1, depth).transpose(1, 2)  # (B, T, C) -> (B, H, T, D)
    incoming = split.reshape(query.shape)  # (B, H, T, D) -> (BH, T, D)
    found = torch.empty_like(kept.heads)
    of_query, of_key, of_value = found
    for number, (begin, end) in reversed(list(enumerate(query_blocks(time)))):
        weights, block = kept.weights[number], incoming[:, begin:end]  # (BH, t, S), (BH, t, D)
        of_weights = torch.bmm(block, value[:, :end].mT)  # (BH, t, D) x (BH, D, S) -> (BH, t, S)
        dropped = weights
        if dropout:
            dropped = drop(weights, kept.survivors[number], dropout)
            of_weights = drop(of_weights, kept.survivors[number], dropout)
        of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_query[:, begin:end] = torch.bmm(of_scores, key[:, :end])  # (BH, t, S) x (BH, S, D) -> (BH, t, D)
        for whole, part in (
            (of_value, torch.bmm(dropped.mT, block)),  # (BH, S, t) x (BH, t, D) -> (BH, S, D)
            (of_key, torch.bmm(of_scores.mT, query[:, begin:end])),
        ):
            # The last block, taken first, sees every key: the others add to what it set.
            whole.copy_(part) if end == time else whole[:, :end].add_(part)
    found[:2].mul_(depth**-0.5)
    together = found.view(3, batch, -1, time, depth).permute(1, 3, 0, 2, 4)  # (3, BH, T, D) -> (B, T, 3, H, D)
    return together.reshape(batch, time, 3 * width)  # (B, T, 3, H, D) -> (B, T, 3C)


def _scores(query: Tensor, key: Tensor, visible: Tensor | None, begin: int, end: int) -> Tensor:
    scale = query.shape[2] ** -0.5
    if visible is None:
        hidden = query.new_full((end - begin, end), -torch.inf).triu_(begin + 1)  # (t, S): 0 where a key is seen
        return torch.baddbmm(hidden, query, key.mT, alpha=scale)  # (BH, t, D) x (BH, D, S) -> (BH, t, S)
    # beta=0 ignores the first argument: what is wanted is a product scaled before it is rounded.
    scores = torch.baddbmm(query.new_empty(1), query, key.mT, beta=0.0, alpha=scale)  # (BH, t, S)
    part = visible[:, :, begin:end, :end]  # (B, 1, t, S)
    scores.view(part.shape[0], -1, *part.shape[2:]).masked_fill_(~part, -torch.inf)  # (BH, t, S) -> (B, H, t, S)
    return scores
