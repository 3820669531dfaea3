"""Cross-entropy of whole logits, and fused with the head chunk by chunk, so that a batch's logits never exist at once.

The fused head computes a chunk's gradient together with its loss; both equal `token_loss` up to rounding.
Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (chunks instead of tiles).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.block_sizes import HEAD_CHUNK_BYTES, HELD_OUT_CHUNK_BYTES

_CACHED_NUMBERS = 2**19
"""Logits differentiated at a time: as many as a core's cache holds while they are read repeatedly."""


def token_loss(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats, in fp32 for logits of any type: logits (B, T, V), targets (B, T) -> scalar.

    `z_loss` times the mean square of the logits' log-sum-exp is in the gradient and not in the value.
    """
    flat = logits.flatten(0, 1).float()  # (B, T, V) -> (B*T, V)
    loss = F.cross_entropy(flat, targets.flatten())  # (B, T) -> (B*T,)
    if z_loss:
        penalty = z_loss * flat.logsumexp(dim=1).square().mean()
        loss = loss + (penalty - penalty.detach())
    return loss


def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in nats without a gradient, few logits at a time: (B, T, C), (V, C), (B, T) -> scalar."""
    flat, ids = hidden.flatten(0, 1), targets.flatten()  # (B, T, C) -> (BT, C), (B, T) -> (BT,)
    rows = max(1, HELD_OUT_CHUNK_BYTES // (4 * len(weight)))
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for begin in range(0, len(flat), rows):
        logits = F.linear(flat[begin : begin + rows], weight).float()  # (r, C) x (C, V) -> (r, V)
        total += F.cross_entropy(logits, ids[begin : begin + rows], reduction="sum")
    return total


def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, *, chunk_bytes: int = HEAD_CHUNK_BYTES
) -> Tensor:
    """Mean cross-entropy in nats of hidden x weight': (B, T, C), (V, C), (B, T) -> scalar; losses and sums are fp32.

    `z_loss` as in `token_loss`.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    flat, ids = hidden.flatten(0, 1), targets.flatten()  # (B, T, C) -> (BT, C), (B, T) -> (BT,)
    loss: Tensor = _HeadLoss.apply(flat, weight, ids, dtype, rows, z_loss)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
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
        table, grad_weight = weight.to(dtype), torch.zeros_like(weight, dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # The kernel hands out blocks this large page by page, so every chunk reuses the same two.
        logits, product = table.new_empty(min(rows, len(hidden)), len(table)), torch.empty_like(table)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, len(hidden), rows):
                chunk, ids = hidden[begin : begin + rows].to(dtype), targets[begin : begin + rows, None]  # (r, C)
                part = torch.mm(chunk, table.mT, out=logits[: len(chunk)])  # (r, C) x (C, V) -> (r, V)
                loss -= _differentiate(part, ids, z_loss, samples=len(hidden))
                grad_hidden[begin : begin + rows] = part @ table  # (r, V) x (V, C) -> (r, C)
                grad_weight += torch.mm(part.mT, chunk, out=product)  # (V, r) x (r, C) -> (V, C)
        context.save_for_backward(grad_hidden, grad_weight)
        return loss / len(hidden)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = context.saved_tensors
        return grad_hidden * gradient, grad_weight * gradient, None, None, None, None


def _differentiate(logits: Tensor, targets: Tensor, z_loss: float, *, samples: int) -> Tensor:
    """Overwrite `logits` (r, V) with the gradient of the mean loss; return the targets' summed log-probabilities."""
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    rows = max(1, _CACHED_NUMBERS // logits.shape[1])
    for part, ids in zip(logits.split(rows), targets.split(rows), strict=True):  # (s, V), (s, 1)
        log_probs = part.float().log_softmax(dim=1)
        total += log_probs.gather(1, ids).sum()
        sums = part[:, :1].float() - log_probs[:, :1] if z_loss else None  # (s, 1)
        grad_logits = log_probs.exp_()
        if sums is not None:
            grad_logits *= 1.0 + 2.0 * z_loss * sums
        grad_logits.scatter_add_(1, ids, grad_logits.new_full(ids.shape, -1.0))
        part.copy_(grad_logits.div_(samples))
    return total
