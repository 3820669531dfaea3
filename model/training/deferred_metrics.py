"""Steps whose numbers the host has not read yet, and the guard that keeps a bad one from changing anything.

Owns what a step has measured, on its device or on the host, and what counts as finite. Refuses to know how a step is
computed and when it is read. A host that reads each loss at once makes an accelerator wait for it between two steps.
Source: the `found_inf` flag of PyTorch's fused optimizers, which its GradScaler raises and lowers.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from model.errors import NonFiniteLoss
from model.training.determinism import Generators


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """What one step measured: mean loss in nats per token, the rate used, the gradient norm before clipping."""

    loss: float
    lr: float
    grad_norm: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeferredStep:
    """What one step, 1-based, has measured or will have on its device, and where its generators stood before it.

    `losses` (micro-batches,) sum to the mean loss of the batch in nats, `grad_norm` is a scalar, both fp32;
    `windows` are those of the whole batch, of which each micro-batch took `micro_batch` in turn.
    """

    step: int
    lr: float
    losses: Tensor
    grad_norm: Tensor
    windows: tuple[int, ...]
    micro_batch: int
    generators: Generators


class UpdateGuard:
    """A flag on the device: the first number that is not finite raises it, and nothing lowers it again.

    Inside the block, while the flag is up, the optimizer's fused update leaves weights, moments and its step counters
    as they are; so however many steps follow a bad one unread, the state stays that of the last good one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Make the flag, lowered."""
        self._optimizer = optimizer
        self._flag = torch.zeros((), dtype=torch.float32, device=device)

    def judge(self, losses: Tensor, grad_norm: Tensor) -> None:
        """Raise the flag if one of `losses` (micro-batches,) or `grad_norm` is not finite; the host does not wait."""
        sound = losses.isfinite().all() & grad_norm.isfinite()
        self._flag.masked_fill_(~sound, 1.0)

    def __enter__(self) -> Self:
        """Let the optimizer ask the flag before every update."""
        self._optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the optimizer update as it does by itself."""
        del self._optimizer.found_inf  # type: ignore[attr-defined]


def fetch_metrics(steps: Sequence[DeferredStep]) -> list[list[float]]:
    """Wait for the device, once, and return the losses of each step with its gradient norm behind them."""
    together = torch.cat([torch.cat((step.losses, step.grad_norm.reshape(1))) for step in steps])
    numbers: list[float] = together.tolist()
    begins = [0]
    for step in steps:
        begins.append(begins[-1] + len(step.losses) + 1)
    return [numbers[begin:end] for begin, end in itertools.pairwise(begins)]


def update_result(step: DeferredStep, numbers: Sequence[float]) -> UpdateResult:
    """Return what `fetch_metrics` found of `step`, or raise NonFiniteLoss as the step itself would have."""
    *losses, grad_norm = numbers
    loss = finite_loss(losses, step=step.step, windows=step.windows, micro_batch=step.micro_batch)
    require_finite_norm(grad_norm, step=step.step, windows=step.windows)
    return UpdateResult(loss=loss, lr=step.lr, grad_norm=grad_norm)


def finite_loss(losses: Sequence[float], *, step: int, windows: Sequence[int], micro_batch: int) -> float:
    """Return the sum of the micro-batches' losses in nats; NonFiniteLoss names the windows of the first bad one."""
    for number, value in enumerate(losses):
        if not math.isfinite(value):
            guilty = windows[number * micro_batch : (number + 1) * micro_batch]
            raise NonFiniteLoss(step=step, quantity="loss", value=value, windows=guilty)
    return math.fsum(losses)


def require_finite_norm(grad_norm: float, *, step: int, windows: Sequence[int]) -> None:
    """Raise NonFiniteLoss for a gradient norm that is not finite; it blames the whole batch."""
    if not math.isfinite(grad_norm):
        raise NonFiniteLoss(step=step, quantity="grad_norm", value=grad_norm, windows=windows)
