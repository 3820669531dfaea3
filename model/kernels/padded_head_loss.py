"""The fused head and cross-entropy for accelerators: vocabulary padded to whole tiles, few large chunks.

One function gives a chunk's loss and gradient; compiled it passes over the logits twice, uncompiled ten times.
Sources: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models"; padding as in Karpathy's nanoGPT.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.kernels.block_sizes import DEVICE_HEAD_CHUNK_BYTES
from model.kernels.compilation import COMPILE_OPTIONS, can_compile

TILE = 128
"""Rows of the vocabulary and of a chunk are multiples of this; matrix units run at half speed on partial tiles."""


def padded_head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, *, chunk_bytes: int = DEVICE_HEAD_CHUNK_BYTES
) -> Tensor:
    """Equal `head_loss` up to rounding: (B, T, C), (V, C), (B, T) -> scalar in nats; losses and sums are fp32."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    flat, ids = hidden.flatten(0, 1), targets.flatten()  # (B, T, C) -> (BT, C), (B, T) -> (BT,)
    rows = chunk_rows(len(flat), len(weight), chunk_bytes=chunk_bytes, number_bytes=dtype.itemsize)
    loss: Tensor = _PaddedHeadLoss.apply(flat, weight, ids, dtype, rows, z_loss)  # type: ignore[no-untyped-call]
    return loss


def padded_vocabulary(vocab_size: int) -> int:
    """Return the smallest multiple of TILE that holds `vocab_size` rows."""
    return -(-vocab_size // TILE) * TILE


def chunk_rows(positions: int, vocab_size: int, *, chunk_bytes: int, number_bytes: int) -> int:
    """Return the positions of a chunk: chunks are as equal as possible, and their logits take at most `chunk_bytes`."""
    most = max(TILE, chunk_bytes // (number_bytes * padded_vocabulary(vocab_size)) // TILE * TILE)
    chunks = -(-positions // most)
    return min(positions, -(-positions // (chunks * TILE)) * TILE)


def loss_and_gradient(logits: Tensor, targets: Tensor, vocab_size: int, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return losses in nats (fp32) and their sum's gradient, 0 from `vocab_size` on: (r, V'), (r,) -> (r,), (r, V').

    `z_loss` as in `token_loss`.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    real = torch.where(columns < vocab_size, logits.float(), float("-inf"))  # (r, V')
    total = real.logsumexp(dim=1)  # (r,)
    losses = total - logits.gather(1, targets[:, None])[:, 0].float()  # (r, V') -> (r,)
    probabilities = (real - total[:, None]).exp()  # (r, V')
    if z_loss:
        probabilities = probabilities * (1.0 + 2.0 * z_loss * total[:, None])
    gradient = probabilities - (columns == targets[:, None]).float()
    return losses, gradient.to(logits.dtype)


@functools.cache
def _loss_and_gradient_on(device: torch.device) -> Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]:
    if not can_compile(device):
        return loss_and_gradient
    return torch.compile(loss_and_gradient, fullgraph=True, dynamic=False, options=COMPILE_OPTIONS)


class _PaddedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        rows: int,
        z_loss: float,
    ) -> Tensor:
        vocab_size, compute = len(weight), _loss_and_gradient_on(hidden.device)
        table = weight.new_zeros((padded_vocabulary(vocab_size), weight.shape[1]), dtype=dtype)  # (V', C)
        table[:vocab_size] = weight
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(table, dtype=torch.float32)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, len(hidden), rows):
                chunk = hidden[begin : begin + rows].to(dtype)  # (r, C)
                losses, grad_logits = compute(chunk @ table.mT, targets[begin : begin + rows], vocab_size, z_loss)
                loss += losses.sum()
                grad_hidden[begin : begin + rows] = grad_logits @ table  # (r, V') x (V', C) -> (r, C)
                grad_weight += grad_logits.mT @ chunk  # (V', r) x (r, C) -> (V', C)
        context.save_for_backward(grad_hidden, grad_weight[:vocab_size])
        return loss / len(hidden)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = context.saved_tensors
        factor = gradient / len(grad_hidden)
        return grad_hidden * factor, grad_weight * factor, None, None, None, None
