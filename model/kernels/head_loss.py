"""The head and its cross-entropy in one, chunk by chunk: the logits of a whole batch never exist.

Owns the backward pass, which is computed with the forward one while a chunk's logits are there. Refuses to know the
network below. The gradient is that of `token_loss` over the product: equal to rounding, not bit for bit.
Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (chunks instead of tiles).
"""

from typing import Any

import torch
from torch import Tensor

from model.kernels.block_sizes import HEAD_CHUNK_BYTES

_CACHED_NUMBERS = 2**19


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_bytes: int = HEAD_CHUNK_BYTES) -> Tensor:
    """Mean cross-entropy in nats of the logits hidden x weight': (B, T, C), (V, C), (B, T) -> scalar.

    Products are made in the precision autocast has chosen, if any; losses, and what is summed over chunks, in fp32.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    flat, wanted = hidden.flatten(0, 1), targets.flatten()  # (B, T, C) -> (BT, C), (B, T) -> (BT,)
    loss: Tensor = _HeadLoss.apply(flat, weight, wanted, dtype, rows)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    """Keeps the two gradients, ready but for the factor that comes from above."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
        table, of_weight = weight.to(dtype), torch.zeros_like(weight, dtype=torch.float32)
        of_hidden = torch.empty_like(hidden)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # Blocks as large as these come from the kernel, page by page: every chunk uses the same ones.
        logits, product = table.new_empty(min(rows, len(hidden)), len(table)), torch.empty_like(table)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, len(hidden), rows):
                chunk, wanted = hidden[begin : begin + rows].to(dtype), targets[begin : begin + rows, None]  # (r, C)
                part = torch.mm(chunk, table.mT, out=logits[: len(chunk)])  # (r, C) x (C, V) -> (r, V)
                loss -= _differentiate(part, wanted, samples=len(hidden))
                of_hidden[begin : begin + rows] = part @ table  # (r, V) x (V, C) -> (r, C)
                of_weight += torch.mm(part.mT, chunk, out=product)  # (V, r) x (r, C) -> (V, C)
        context.save_for_backward(of_hidden, of_weight)
        return loss / len(hidden)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = context.saved_tensors
        return of_hidden * gradient, of_weight * gradient, None, None, None


def _differentiate(logits: Tensor, targets: Tensor, *, samples: int) -> Tensor:
    """Put the gradient of the mean loss over `samples` in place of `logits` (r, V); return the sum of log-chances.

    In fp32, a few rows at a time: as many as a core's cache holds while they are read again and again.
    """
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    rows = max(1, _CACHED_NUMBERS // logits.shape[1])
    for part, wanted in zip(logits.split(rows), targets.split(rows), strict=True):  # (s, V), (s, 1)
        log_chances = part.float().log_softmax(dim=1)
        total += log_chances.gather(1, wanted).sum()
        of_logits = log_chances.exp_()
        of_logits.scatter_add_(1, wanted, of_logits.new_full(wanted.shape, -1.0))
        part.copy_(of_logits.div_(samples))
    return total
