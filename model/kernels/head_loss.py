"""Cross-entropy of whole logits, and fused with the head chunk by chunk, so that a batch's logits never exist at once.

A chunk's gradient is computed together with its loss: in place on a CPU; on accelerators in few large chunks, with the
vocabulary padded to whole tiles, by one function that passes over the logits twice if compiled and ten times if not.
A target below 0 does not count: it adds 0 to the mean, and nothing to a gradient.
Sources: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models"; padding as in Karpathy's nanoGPT.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.model.kernels.block_sizes import DEVICE_HEAD_CHUNK_BYTES, HEAD_CHUNK_BYTES, HELD_OUT_CHUNK_BYTES

_CACHED_NUMBERS = 2**19
"""Logits differentiated at a time: as many as a core's cache holds while they are read repeatedly."""
TILE = 128
"""Rows of the vocabulary and of a chunk are multiples of this; matrix units run at half speed on partial tiles."""
COMPILE_OPTIONS: dict[str, Any] = {"deterministic": True}
"""Options for torch.compile under which every process gets the same bits: no timing chooses a kernel."""
_Way = tuple[torch.dtype, int, float, bool]
"""The number format of products, rows of a chunk, weight of the z-loss, and whether the vocabulary is padded."""


def as_ids(tokens: Tensor) -> Tensor:
    """Return the ids of tokens, of which those that do not count have their bits inverted."""
    return tokens ^ (tokens >> 63)  # all bits of the shifted number are its sign


def token_loss(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats, in fp32 for logits of any type: logits (B, T, V), targets (B, T) -> scalar.

    `z_loss` times the mean square of the logits' log-sum-exp is in the gradient and not in the value.
    """
    flat, ids = logits.flatten(0, 1).float(), targets.flatten().clamp(min=-1)  # (B, T, V) -> (B*T, V), (B, T) -> (B*T,)
    loss = F.cross_entropy(flat, ids, ignore_index=-1, reduction="sum") / len(ids)
    if z_loss:
        penalty = z_loss * flat.logsumexp(dim=1).square().masked_fill(ids < 0, 0.0).mean()
        loss = loss + (penalty - penalty.detach())
    return loss


def window_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of each row in nats, no gradient, few logits at a time: (B, T, C), (V, C), (B, T) -> (B,)."""
    flat, ids = hidden.flatten(0, 1), targets.flatten().clamp(min=-1)  # (B, T, C) -> (BT, C), (B, T) -> (BT,)
    rows = max(1, HELD_OUT_CHUNK_BYTES // (4 * len(weight)))
    losses = torch.empty(len(flat), dtype=torch.float32, device=hidden.device)
    for begin in range(0, len(flat), rows):
        part = slice(begin, begin + rows)
        logits = F.linear(flat[part], weight).float()  # (r, C) x (C, V) -> (r, V)
        losses[part] = F.cross_entropy(logits, ids[part], ignore_index=-1, reduction="none")
    return losses.view(targets.shape).double().mean(dim=1)


def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0, *, is_padded: bool = False, chunk_bytes: int = 0
) -> Tensor:
    """Mean cross-entropy in nats of hidden x weight': (B, T, C), (V, C), (B, T) -> scalar; losses and sums are fp32.

    `z_loss` as in `token_loss`; with whole tiles, for accelerators, the result is equal up to rounding.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    flat, ids = hidden.flatten(0, 1), targets.flatten()  # (B, T, C) -> (BT, C), (B, T) -> (BT,)
    rows = max(1, (chunk_bytes or HEAD_CHUNK_BYTES) // (4 * len(weight)))
    if is_padded:
        chunk_bytes = chunk_bytes or DEVICE_HEAD_CHUNK_BYTES
        rows = chunk_rows(len(flat), len(weight), chunk_bytes=chunk_bytes, number_bytes=dtype.itemsize)
    loss: Tensor = _HeadLoss.apply(flat, weight, ids, (dtype, rows, z_loss, is_padded))  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    """Chunk by chunk: in place on a CPU, and with a vocabulary that `is_padded` on accelerators."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, targets: Tensor, how: _Way) -> Tensor:
        dtype, rows, z_loss, is_padded = how
        count, vocab_size, compute = len(hidden), len(weight), _loss_and_gradient_on(hidden.device)
        table = weight.to(dtype)
        if is_padded:
            table = F.pad(table, (0, 0, 0, padded_vocabulary(vocab_size) - vocab_size))  # (V', C)
        grad_weight = torch.zeros_like(table, dtype=torch.float32) if context.needs_input_grad[1] else None
        grad_hidden, loss = torch.empty_like(hidden), torch.zeros((), dtype=torch.float32, device=hidden.device)
        # The kernel hands out blocks this large page by page, so every chunk on a CPU reuses the same two.
        logits = None if is_padded else table.new_empty(min(rows, count), vocab_size)
        product = None if is_padded or grad_weight is None else torch.empty_like(table)
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, count, rows):
                chunk, ids = hidden[begin : begin + rows].to(dtype), targets[begin : begin + rows]  # (r, C), (r,)
                left_out = (ids < 0)[:, None]
                if logits is None:
                    losses, part = compute(chunk @ table.mT, ids.clamp(min=0), vocab_size, z_loss)
                    # Without the host's knowledge, and so in the narrow factors of every chunk.
                    loss += losses.masked_fill(left_out[:, 0], 0.0).sum()
                    grad_chunk = (part @ table).masked_fill_(left_out, 0.0)  # (r, V') x (V', C) -> (r, C)
                    chunk = chunk.masked_fill(left_out, 0.0)
                else:
                    part = torch.mm(chunk, table.mT, out=logits[: len(chunk)])  # (r, C) x (C, V) -> (r, V)
                    loss -= _differentiate(part, ids[:, None], z_loss, samples=count)
                    if left_out.any():
                        part.masked_fill_(left_out, 0.0)
                    grad_chunk = part @ table  # (r, V) x (V, C) -> (r, C)
                grad_hidden[begin : begin + rows] = grad_chunk
                if grad_weight is not None:
                    grad_weight += torch.mm(part.mT, chunk, out=product)  # (V, r) x (r, C) -> (V, C)
        context.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight[:vocab_size])
        context.divided_by = count if is_padded else 1
        return loss / count

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = context.saved_tensors
        factor = gradient / context.divided_by
        of_weight = None if grad_weight is None else grad_weight * factor
        return grad_hidden * factor, of_weight, None, None


def _differentiate(logits: Tensor, targets: Tensor, z_loss: float, *, samples: int) -> Tensor:
    """Overwrite `logits` (r, V) with the gradient of the mean loss; return the targets' summed log-probabilities."""
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    rows = max(1, _CACHED_NUMBERS // logits.shape[1])
    for part, ids in zip(logits.split(rows), targets.split(rows), strict=True):  # (s, V), (s, 1)
        log_probs, chosen = part.float().log_softmax(dim=1), ids.clamp(min=0)
        total += log_probs.gather(1, chosen).masked_fill_(ids < 0, 0.0).sum()
        sums = part[:, :1].float() - log_probs[:, :1] if z_loss else None  # (s, 1)
        grad_logits = log_probs.exp_()
        if sums is not None:
            grad_logits *= 1.0 + 2.0 * z_loss * sums
        grad_logits.scatter_add_(1, chosen, grad_logits.new_full(ids.shape, -1.0))
        part.copy_(grad_logits.div_(samples))
    return total


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
def can_compile(device: torch.device) -> bool:
    """Whether kernels can be compiled for `device`: it is CUDA, and Triton and a C compiler are installed."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < (7, 0):  # Triton's minimum
        return False
    return "CC" in os.environ or any(shutil.which(name) for name in ("gcc", "clang", "cc"))


@functools.cache
def _loss_and_gradient_on(device: torch.device) -> Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]:
    if not can_compile(device):
        return loss_and_gradient
    return torch.compile(loss_and_gradient, fullgraph=True, dynamic=False, options=COMPILE_OPTIONS)
