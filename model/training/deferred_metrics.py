"""The metrics of steps that the host fetches later, and the guard that keeps a non-finite step from changing anything.

Fetching each loss immediately makes an accelerator idle between two steps.
Source: the `found_inf` flag of PyTorch's fused optimizers, set by its GradScaler.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from model.errors import NonFiniteLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """A step's mean loss in nats per token, lr, gradient norm before clipping, loss scale; digest None if sharded.

    `rank_seconds` are what each rank worked by itself, on a GPU in an earlier step; empty where that is not known.
    """

    loss: float
    lr: float
    grad_norm: float
    loss_scale: float | None = None
    weights_digest: str | None = None
    rank_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeferredStep:
    """A launched step (1-based) whose metrics are still on its device.

    `losses` (micro-batches,) sum to the batch's mean loss in nats, `grad_norm` is a scalar, `rank_seconds` (ranks,) are
    those of `UpdateResult`; all fp32. `weights_sum` is that of the state after the step, `windows` are the whole batch,
    `parts` the rows of each micro-batch.
    """

    step: int
    lr: float
    losses: Tensor
    rank_seconds: Tensor
    grad_norm: Tensor
    weights_sum: Tensor | None
    windows: tuple[int, ...]
    parts: tuple[slice, ...]


class UpdateGuard:
    """A flag on the device that the first non-finite number sets and nothing clears.

    While it is set inside the `with` block, no update changes the state: it stays that of the last finite step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._optimizers = optimizers
        self._flag = torch.zeros((), dtype=torch.float32, device=device)

    def check(self, losses: Tensor, grad_norm: Tensor) -> None:
        """Set the flag if one of `losses` (micro-batches,) or `grad_norm` is not finite; the host does not wait."""
        finite = losses.isfinite().all() & grad_norm.isfinite()
        self._flag.masked_fill_(~finite, 1.0)

    def __enter__(self) -> Self:
        for optimizer in self._optimizers:
            optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        return self

    def __exit__(self, *error: object) -> None:
        for optimizer in self._optimizers:
            del optimizer.found_inf  # type: ignore[attr-defined]


def fetch_metrics(steps: Sequence[DeferredStep]) -> list[list[float]]:
    """Wait once for the device and return each step's losses, gradient norm and seconds of the ranks, in this order."""
    parts = [torch.cat((step.losses, step.grad_norm.reshape(1), step.rank_seconds)) for step in steps]  # () -> (1,)
    numbers: list[float] = torch.cat(parts).tolist()
    begins = itertools.accumulate(map(len, parts), initial=0)
    return [numbers[begin:end] for begin, end in itertools.pairwise(begins)]


def resolve_step(step: DeferredStep, numbers: Sequence[float]) -> UpdateResult:
    """Return the result of `step` from its fetched numbers, or raise NonFiniteLoss as the step itself would."""
    count = len(step.parts)
    losses, grad_norm, rank_seconds = numbers[:count], numbers[count], tuple(numbers[count + 1 :])
    loss = sum_finite_losses(losses, step=step.step, windows=step.windows, parts=step.parts)
    require_finite_norm(grad_norm, step=step.step, windows=step.windows)
    digest = format_weights_sum(step.weights_sum)
    return UpdateResult(loss=loss, lr=step.lr, grad_norm=grad_norm, weights_digest=digest, rank_seconds=rank_seconds)


def format_weights_sum(weights_sum: Tensor | None) -> str | None:
    """Return the sum as 16 hex digits."""
    return None if weights_sum is None else f"{int(weights_sum) % 2**64:016x}"


def sum_finite_losses(losses: Sequence[float], *, step: int, windows: Sequence[int], parts: Sequence[slice]) -> float:
    """Return the sum of the micro-batches' losses; NonFiniteLoss names the windows of the first non-finite one."""
    for value, part in zip(losses, parts, strict=True):
        if not math.isfinite(value):
            raise NonFiniteLoss(step=step, quantity="loss", value=value, windows=windows[part])
    return math.fsum(losses)


def require_finite_norm(grad_norm: float, *, step: int, windows: Sequence[int]) -> None:
    """Raise NonFiniteLoss with the windows of the whole batch if the gradient norm is not finite."""
    if not math.isfinite(grad_norm):
        raise NonFiniteLoss(step=step, quantity="grad_norm", value=grad_norm, windows=windows)
