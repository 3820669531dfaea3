"""Robust statistics of a loss curve: level, best level, noise and spikes, by medians and median absolute deviations.

Source: Huber, Robust Statistics, 1981. The work is bounded: a million steps become some blocks of medians.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LARGEST_WINDOW = 200
_SPIKE_WINDOW = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A run's curve up to a step: one train loss per step and the held-out losses so far, in nats per token.

    `steps`, `train_losses` and, unless empty, the other columns are equally long; a gradient norm is None if unknown.
    `slowest_ranks` names the rank that worked for longest and how many times as long as the median one.
    `val` is pairs of step and loss, `samples` are generated texts. All are in step order. `vocab_size` 0 means unknown,
    `grad_clip` 0 that nothing is clipped.
    """

    steps: Sequence[int]
    train_losses: Sequence[float]
    grad_norms: Sequence[float | None] = ()
    learning_rates: Sequence[float] = ()
    tokens_per_second: Sequence[float] = ()
    seconds: Sequence[float] = ()
    slowest_ranks: Sequence[tuple[str, float] | None] = ()
    samples: Sequence[str] = ()
    val: Sequence[tuple[int, float]] = ()
    vocab_size: int = 0
    total_steps: int = 0
    grad_clip: float = 0.0

    def __post_init__(self) -> None:
        for name in ("grad_norms", "learning_rates", "tokens_per_second", "seconds", "slowest_ranks"):
            column = getattr(self, name)
            if len(column) not in (0, len(self.steps)):
                raise ValueError(f"{name}: {len(column)} values, must be none or {len(self.steps)} as steps")
        if len(self.train_losses) != len(self.steps):
            raise ValueError(f"train_losses: {len(self.train_losses)} values, must be {len(self.steps)} as steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """The median loss of the newest window, of the best window before it, and the standard error of such medians."""

    now: float
    window_steps: int
    best: float
    best_step: int
    standard_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Spikes:
    """Steps far above the median of the steps before them, and the noise they are compared with."""

    count: int
    looked_back_steps: int
    noise: float
    worst_step: int = 0
    worst_rise: float = 0.0
    worst_grad_ratio: float = 0.0


def window_of(count: int) -> int:
    """Return the window of a level, in steps, for a curve of `count` steps."""
    return int(np.clip(count // 10, 5, _LARGEST_WINDOW))


def level_of(steps: Sequence[int], losses: Floats) -> Level:
    """Return the level now and the best one before, over windows counted back from the newest step; needs two."""
    window = window_of(len(losses))
    blocks = losses[len(losses) % window :].reshape(-1, window)  # (blocks, window), the newest last
    medians = np.median(blocks, axis=1)
    best = int(np.argmin(medians[:-1]))
    last_of_best = len(losses) % window + (best + 1) * window - 1
    noise = deviation((blocks - medians[:, None])[-20:].ravel())
    return Level(
        now=float(medians[-1]),
        window_steps=window,
        best=float(medians[best]),
        best_step=int(steps[last_of_best]),
        standard_error=1.2533 * noise / float(np.sqrt(window)),  # that of a median over that of a mean: sqrt(pi / 2)
    )


def levels_at(curve: Curve, losses: Floats, steps: Sequence[int]) -> tuple[float, ...]:
    """Return the median losses of the windows that end at these steps."""
    ends = np.searchsorted(np.asarray(curve.steps), np.asarray(steps), side="right").tolist()
    return tuple(float(np.median(losses[max(0, end - window_of(end)) : end])) for end in ends)


def spikes_of(curve: Curve, losses: Floats, *, sigmas: float, share: float) -> Spikes:
    """Return the steps that rise by `sigmas` of noise and by `share` of the level over the median before them."""
    count = len(losses)
    looked_back = min(max(count // 2, 500), 10_000, count - _SPIKE_WINDOW)
    if looked_back < 1:
        return Spikes(count=0, looked_back_steps=0, noise=0.0)
    tail = losses[count - looked_back - _SPIKE_WINDOW :]
    before = np.lib.stride_tricks.sliding_window_view(tail[:-1], _SPIKE_WINDOW)  # (looked_back, window)
    base = np.median(before, axis=1)
    rise = tail[_SPIKE_WINDOW:] - base
    noise = deviation(rise)
    found = np.flatnonzero(rise > np.maximum(sigmas * noise, share * np.abs(base)))
    if not len(found):
        return Spikes(count=0, looked_back_steps=looked_back, noise=noise)
    worst = int(found[np.argmax(rise[found])])
    return Spikes(
        count=int(1 + np.count_nonzero(np.diff(found) > _SPIKE_WINDOW)),  # steps within one window are one spike
        looked_back_steps=looked_back,
        noise=noise,
        worst_step=int(curve.steps[count - looked_back + worst]),
        worst_rise=float(rise[worst]),
        worst_grad_ratio=_grad_ratio(curve, count - looked_back + worst),
    )


def deviation(values: Floats) -> float:
    """Return the standard deviation of a normal distribution with this median absolute deviation."""
    return float(1.4826 * np.median(np.abs(values - np.median(values))))


def _grad_ratio(curve: Curve, index: int) -> float:
    """Gradient norm of one step over the median around it; 0 if unknown."""
    around = curve.grad_norms[max(0, index - _LARGEST_WINDOW) : index + _LARGEST_WINDOW]
    known = [norm for norm in around if norm is not None and np.isfinite(norm)]
    norm = curve.grad_norms[index] if curve.grad_norms else None
    middle = float(np.median(known)) if known else 0.0
    return norm / middle if norm is not None and np.isfinite(norm) and middle > 0 else 0.0
