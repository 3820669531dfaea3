"""Held-out metrics of a model over a fixed slice of windows, in fp32 except on layers that are gathered in less."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from cairn.model.architectures.gpt import GPT
from cairn.model.data.token_windows import TokenWindows
from cairn.model.errors import InvalidInput
from cairn.model.kernels import block_sizes, head_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationMetrics:
    """Loss in nats per token, its perplexity, bits per byte of text, and the number of windows measured."""

    val_loss: float
    perplexity: float
    bits_per_byte: float
    samples: int


@contextlib.contextmanager
def evaluation_mode(model: GPT) -> Iterator[None]:
    """Turn dropout and gradients off for the block, then restore the model's mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(model.device.type, model.gathered_dtype, model.gathered_dtype is not None):
            yield
    finally:
        model.train(was_training)


def held_out_loss(
    model: GPT, windows: TokenWindows, *, batches: int, batch_size: int, among: range | None = None
) -> tuple[float, int]:
    """Return the mean loss in nats per token and the number of windows: `batches * batch_size`, or all, if fewer.

    The windows are evenly spread over the data, or over those `among` it, and always the same ones. They are measured
    some thousand tokens at a time, whatever the batch size: the loss depends on nothing but the slice.
    """
    if batches < 1 or batch_size < 1:
        raise InvalidInput(f"batches={batches} and batch_size={batch_size} must be at least 1")
    among = range(windows.window_count) if among is None else among
    total, count = 0.0, min(batches * batch_size, len(among))
    chosen = among.start + np.arange(count, dtype=np.int64) * len(among) // count
    with evaluation_mode(model):
        at_once = max(1, block_sizes.HELD_OUT_TOKENS // windows.block_size)
        for start in range(0, len(chosen), at_once):
            tokens = torch.from_numpy(windows.gather(chosen[start : start + at_once])).to(model.device)  # (b, T+1)
            total += float(head_loss.summed_loss(model.hidden(tokens[:, :-1]), model.head_weight, tokens[:, 1:]))
    return total / (count * windows.block_size), count


def evaluate(
    model: GPT, val_windows: TokenWindows, *, batches: int, batch_size: int, bytes_per_token: float
) -> EvaluationMetrics:
    """Measure `model` on `batches` x `batch_size` held-out windows; leaves its mode and all generators unchanged."""
    if not bytes_per_token > 0:
        raise InvalidInput(f"bytes_per_token={bytes_per_token} must be above 0")
    loss, samples = held_out_loss(model, val_windows, batches=batches, batch_size=batch_size)
    return EvaluationMetrics(
        val_loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=loss / math.log(2.0) / bytes_per_token,
        samples=samples,
    )
