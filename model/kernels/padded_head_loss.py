"""The head and its cross-entropy for matrix units: a padded vocabulary, in few large chunks.

Owns the padding, which nobody outside sees, and the backward pass, computed with the forward one while a chunk's logits
are there. Refuses to know the network below. Loss and gradient of a chunk come from one function that a compiler makes
into two passes over the logits; made of single operations it takes five times as many.
Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (chunks instead of tiles); the
padding is that of Karpathy's nanoGPT, which stores it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.kernels.block_sizes import DEVICE_HEAD_CHUNK_BYTES
from model.kernels.compilation import can_compile, compile_options

MULTIPLE = 128
"""Rows of the vocabulary and of a chunk: matrix units take tiles of this size, and go at half speed on odd ones."""

JudgeLogits = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def padded_head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_bytes: int = DEVICE_HEAD_CHUNK_BYTES
) -> Tensor:
    """Mean cross-entropy in nats of the logits hidden x weight': (B, T, C), (V, C), (B, T) -> scalar.

    Products are made in the precision autocast has chosen, if any; losses, and what is summed over chunks, in fp32.
    Equal to `head_loss` up to rounding.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    flat, wanted = hidden.flatten(0, 1), targets.flatten()  # (B, T, C) -> (BT, C), (B, T) -> (BT,)
    rows = chunk_rows(len(flat), len(weight), chunk_bytes=chunk_bytes, number_bytes=dtype.itemsize)
    loss: Tensor = _PaddedHeadLoss.apply(flat, weight, wanted, dtype, rows)  # type: ignore[no-untyped-call]
    return loss


def padded_vocabulary(vocab_size: int) -> int:
    """Return how many rows the table has for so many ids."""
    return -(-vocab_size // MULTIPLE) * MULTIPLE


def chunk_rows(positions: int, vocab_size: int, *, chunk_bytes: int, number_bytes: int) -> int:
    """Return how many positions a chunk has: as equal chunks as can be, whose logits take at most `chunk_bytes`."""
    most = max(MULTIPLE, chunk_bytes // (number_bytes * padded_vocabulary(vocab_size)) // MULTIPLE * MULTIPLE)
    chunks = -(-positions // most)
    return min(positions, -(-positions // (chunks * MULTIPLE)) * MULTIPLE)


def judge_logits(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return each position's loss in nats, fp32, and the gradient of their sum by the logits, in the logits' type.

    (r, V'), (r,) -> (r,), (r, V'). Columns from `vocab_size` on are padding: no chance falls on them, and no gradient.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    real = torch.where(columns < vocab_size, logits.float(), float("-inf"))  # (r, V')
    total = real.logsumexp(dim=1)  # (r,)
    losses = total - logits.gather(1, targets[:, None])[:, 0].float()  # (r, V') -> (r,)
    chances = (real - total[:, None]).exp()  # (r, V')
    gradient = chances - (columns == targets[:, None]).float()
    return losses, gradient.to(logits.dtype)


@functools.cache
def _judge_for(device: torch.device) -> JudgeLogits:
    if not can_compile(device):
        return judge_logits
    compiled: JudgeLogits = torch.compile(judge_logits, fullgraph=True, dynamic=False, options=compile_options())
    return compiled


class _PaddedHeadLoss(torch.autograd.Function):
    """Keeps the two gradients, ready but for the factor that comes from above and the number of positions."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
        vocab_size, judge = len(weight), _judge_for(hidden.device)
        table = weight.new_zeros((padded_vocabulary(vocab_size), weight.shape[1]), dtype=dtype)  # (V', C)
        table[:vocab_size] = weight
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(table, dtype=torch.float32)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, len(hidden), rows):
                chunk = hidden[begin : begin + rows].to(dtype)  # (r, C)
                losses, of_logits = judge(chunk @ table.mT, targets[begin : begin + rows], vocab_size)
                loss += losses.sum()
                of_hidden[begin : begin + rows] = of_logits @ table  # (r, V') x (V', C) -> (r, C)
                of_weight += of_logits.mT @ chunk  # (V', r) x (r, C) -> (V', C)
        context.save_for_backward(of_hidden, of_weight[:vocab_size])
        return loss / len(hidden)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = context.saved_tensors
        factor = gradient / len(of_hidden)
        return of_hidden * factor, of_weight * factor, None, None, None
