"""Robust statistics of a loss curve: medians and median absolute deviations.

Source: Huber, Robust Statistics, 1981; the work is bounded: of a long curve only the newest steps are whole, those
before them are blocks of medians.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.storage.logs.step_log import StepRecord

Floats = NDArray[np.float64]

LARGEST_WINDOW, SAMPLES = 200, 3
_SPIKE_WINDOW = 16
# A spike's gradient is so many times as long as the median one around it. Harder text has up to 6 times, spikes of real
# runs have 7 to 500 times.
_LOUD = 7.0
# So many quiet steps, or one in a hundred, may come near a spike: it is so many times as high as theirs.
_USUAL_RISES, _USUAL_HEIGHT = 3, 1.33
# A jump: three of four of 16 steps lie above the median of the 16 before by the share, the nats and the noise, which a
# tenth of harder steps does not. It comes at once, and the level rises by much of its height neither before nor after.
_JUMP_WINDOW, _JUMP_SHARE, _JUMP_NATS, _JUMP_SIGMAS = 16, 0.03, 0.05, 1.5
_JUMP_AT_ONCE, _JUMP_DRIFT, _JUMP_DRIFT_STEPS = 0.6, 0.25, 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveBeginning:
    """The steps before those of a long curve, in blocks of 200: the last step of each, medians of losses and speeds.

    `highest_lr` and `first_lr` are those of all these steps, `broken_step` the first one whose loss is not finite,
    `jump_step` the newest one from which on the text was harder, 0 if none.
    """

    last_steps: Sequence[int] = ()
    train_losses: Sequence[float] = ()
    tokens_per_second: Sequence[float] = ()
    first_step: int | None = None
    first_lr: float = 0.0
    highest_lr: float = 0.0
    broken_step: int | None = None
    jump_step: int = 0

    @property
    def count(self) -> int:
        """The number of steps."""
        return len(self.last_steps) * LARGEST_WINDOW


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A run's curve up to a step: one train loss per step and the held-out losses so far, in nats per token.

    `steps`, `train_losses` and, unless empty, the other columns are equally long; a gradient norm is None if unknown.
    `slowest_ranks` names the rank that worked for longest and how many times as long as the median one.
    `val` is pairs of step and loss, `samples` are generated texts. All are in step order. `vocab_size` 0 means unknown,
    `grad_clip` 0 that nothing is clipped. `beginning` has the steps before these, if the curve is long. Which cures
    are in effect depends on `grad_clip`, `min_lr`, `threads` (None and 0: unknown), `patience` and `overfit_ratio`.
    """

    beginning: CurveBeginning = CurveBeginning()
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
    min_lr: float | None = None
    threads: int = 0
    patience: int = 0
    overfit_ratio: float = 0.0

    @property
    def count(self) -> int:
        """The number of steps."""
        return self.beginning.count + len(self.steps)

    @property
    def first_step(self) -> int:
        """The first step of the curve, which has one."""
        return self.steps[0] if self.beginning.first_step is None else self.beginning.first_step

    def step_at(self, place: int) -> int:
        """Return the step at a place in the whole curve; of the beginning, the last step of its block."""
        beginning = self.beginning
        if place < beginning.count:
            return beginning.last_steps[place // LARGEST_WINDOW]
        return int(self.steps[place - beginning.count])

    def steps_since_highest_lr(self) -> int:
        """Return how many steps there are from the first one with the highest learning rate, among those kept whole."""
        rates = np.asarray(self.learning_rates)
        if not len(rates) or (self.beginning.count and self.beginning.highest_lr >= rates.max()):
            return len(rates)
        return len(rates) - int(np.argmax(rates))


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
    """Steps far above the median of the steps before them, and the noise they are compared with.

    `worst_grad_ratio` is the worst step's gradient norm over the median around it; 0 if unknown.
    """

    count: int
    looked_back_steps: int
    noise: float
    worst_step: int = 0
    worst_rise: float = 0.0
    worst_grad_ratio: float = 0.0


def level_of(curve: Curve, losses: Floats, *, since_step: int = 0) -> Level:
    """Return the level now and the best one before it from `since_step` on, over windows counted from the newest step.

    It needs two windows; if none of those before is of these steps, the best level is the level now.
    """
    window, beginning = _window(curve.count), curve.beginning
    blocks = losses[len(losses) % window :].reshape(-1, window)  # (blocks, window), the newest last
    medians = np.median(blocks, axis=1)
    noise = _deviation((blocks - medians[:, None])[-20:].ravel())
    lasts = [int(curve.steps[last]) for last in range(len(losses) % window + window - 1, len(losses), window)]
    levels = chain(
        zip(beginning.train_losses, beginning.last_steps, strict=True), zip(medians[:-1].tolist(), lasts, strict=False)
    )
    counted = (pair for pair in levels if pair[1] - window >= since_step - 1 or not since_step)
    best_loss, best_step = min(counted, key=lambda pair: pair[0], default=(float(medians[-1]), lasts[-1]))
    return Level(
        now=float(medians[-1]),
        window_steps=window,
        best=best_loss,
        best_step=best_step,
        standard_error=1.2533 * noise / float(np.sqrt(window)),  # that of a median over that of a mean: sqrt(pi / 2)
    )


def levels_at(curve: Curve, losses: Floats, steps: Sequence[int]) -> tuple[float, ...]:
    """Return the median losses of the windows that end at these steps, in the beginning of the blocks with them."""
    before, ends = curve.beginning, np.searchsorted(np.asarray(curve.steps), np.asarray(steps), side="right").tolist()
    blocks = np.searchsorted(np.asarray(before.last_steps), np.asarray(steps)).tolist()
    return tuple(
        float(np.median(losses[max(0, end - _window(before.count + end)) : end]))
        if end >= LARGEST_WINDOW or not before.count
        else before.train_losses[min(block, len(before.last_steps) - 1)]
        for end, block in zip(ends, blocks, strict=True)
    )


def jump_step(curve: Curve, losses: Floats) -> int:
    """Return the newest step at which the level rose at once and without a loud gradient, as by harder text; else 0."""
    width = _JUMP_WINDOW
    if len(losses) < 2 * width:
        return curve.beginning.jump_step
    windows = np.lib.stride_tricks.sliding_window_view(losses, width)
    before, after = np.median(windows[:-width], axis=1), np.quantile(windows[width:], 0.25, axis=1)
    rise, noise = after - before, _deviation(np.diff(losses)) / np.sqrt(2)  # at the places from `width` on
    least = np.maximum(_JUMP_SHARE * np.abs(before), max(_JUMP_NATS, _JUMP_SIGMAS * float(noise)))
    for places in reversed(_spans(np.flatnonzero(rise > least) + width, width)):
        near = range(max(4, int(places[0]) - 4), min(int(places[-1]) + 4, len(losses) - width) + 1)
        at = max(near, key=lambda place: _step_height(losses, place, 4))
        # It rises here, and neither gradually nor for long before or after.
        height, start, end = _step_height(losses, at, width), max(0, at - width), at + width
        earlier, later = losses[max(0, start - _JUMP_DRIFT_STEPS) : start], losses[end : end + _JUMP_DRIFT_STEPS]
        drift_before = np.median(losses[start:at]) - np.median(earlier) if len(earlier) >= width else 0.0
        drift_after = np.median(later) - np.median(losses[at:end]) if len(later) >= width else 0.0
        is_at_once = _step_height(losses, at, 4) >= _JUMP_AT_ONCE * height
        loudness = _loudness(curve, np.arange(at - 1, at + 3))
        is_quiet = bool(((loudness > 0) & (loudness < _LOUD)).all())
        if is_at_once and is_quiet and max(drift_before, drift_after) <= _JUMP_DRIFT * height:
            return int(curve.steps[at])
    return curve.beginning.jump_step


def _step_height(losses: Floats, at: int, width: int) -> float:
    """Return how much higher the median of the steps from a place on is than that of the steps before it."""
    return float(np.median(losses[at : at + width]) - np.median(losses[max(0, at - width) : at]))


def spikes_of(curve: Curve, losses: Floats, *, sigmas: float, share: float) -> Spikes:
    """Return the steps that rise by `sigmas` of noise and by `share` of the level over the median before them.

    Only those with a loud gradient count. One spike in the warm-up is forgotten, more are not.
    """
    count = len(losses)
    looked_back = min(max(count // 2, 500), 10_000, count - _SPIKE_WINDOW)
    if looked_back < 1:
        return Spikes(count=0, looked_back_steps=0, noise=0.0)
    tail = losses[count - looked_back - _SPIKE_WINDOW :]
    before = np.lib.stride_tricks.sliding_window_view(tail[:-1], _SPIKE_WINDOW)  # (looked_back, window)
    base = np.median(before, axis=1)
    rise = tail[_SPIKE_WINDOW:] - base
    noise = _deviation(rise)
    first = count - looked_back
    found = np.flatnonzero(rise > np.maximum(sigmas * noise, share * np.abs(base))) + first
    spikes = _spans(found[_loudness(curve, found) >= _LOUD], _SPIKE_WINDOW)
    usual, is_quiet = max(_USUAL_RISES, looked_back // 100), np.ones(looked_back, dtype=np.bool_)
    for spike in spikes:
        is_quiet[max(0, spike[0] - first - _SPIKE_WINDOW) : spike[-1] - first + _SPIKE_WINDOW] = False
    least = _USUAL_HEIGHT * np.partition(rise[is_quiet], -usual)[-usual] if is_quiet.sum() >= usual else 0.0
    spikes = [spike for spike in spikes if rise[spike - first].max() >= least]
    warm = count - curve.steps_since_highest_lr() if len(curve.learning_rates) else -1
    early = [spike for spike in spikes if spike[0] <= warm]
    spikes = spikes[1:] if len(early) == 1 else spikes
    if not spikes:
        return Spikes(count=0, looked_back_steps=looked_back, noise=noise)
    index = int(max(np.concatenate(spikes), key=lambda place: rise[place - first]))
    ratio = float(_loudness(curve, np.array([index]))[0])
    return Spikes(
        count=len(spikes),
        looked_back_steps=looked_back,
        noise=noise,
        worst_step=int(curve.steps[index]),
        worst_rise=float(rise[index - first]),
        worst_grad_ratio=ratio if np.isfinite(ratio) else 0.0,
    )


def _window(count: int) -> int:
    """Return the window of a level, in steps, for a curve of `count` steps."""
    return int(np.clip(count // 10, 5, LARGEST_WINDOW))


def _spans(places: NDArray[np.intp], gap: int) -> list[NDArray[np.intp]]:
    """Return places in rising order in spans: places at most `gap` apart are of one span."""
    return np.split(places, np.flatnonzero(np.diff(places) > gap) + 1) if len(places) else []


def _loudness(curve: Curve, places: NDArray[np.intp]) -> Floats:
    """Return how many times as long as the median around it each gradient is; one that is not finite is infinitely so.

    It is 0 where the median is unknown.
    """
    norms, ratios = np.array(curve.grad_norms, dtype=np.float64), np.zeros(len(places))  # None becomes NaN
    for at, place in enumerate(places.tolist() if len(norms) else ()):
        around = norms[max(0, place - LARGEST_WINDOW) : place + LARGEST_WINDOW]
        known = around[np.isfinite(around)]
        middle = float(np.median(known)) if len(known) else 0.0
        ratios[at] = 0.0 if middle <= 0 else norms[place] / middle if np.isfinite(norms[place]) else np.inf
    return ratios


def _deviation(values: Floats) -> float:
    """Return the standard deviation of a normal distribution with this median absolute deviation."""
    return float(1.4826 * np.median(np.abs(values - np.median(values))))


FOLDED_STEPS = 20_000
"""So many steps become blocks once twice as many are whole: the same steps always make the same curve."""
_COLUMNS = ("steps", "train_losses", "grad_norms", "learning_rates", "tokens_per_second", "seconds", "slowest_ranks")


class CurveFold:
    """A curve to which steps are added in order."""

    def __init__(self) -> None:
        self._beginning, self._samples = CurveBeginning(), deque[str](maxlen=SAMPLES)
        self._rows = list[tuple[Any, ...]]()

    def add(self, record: StepRecord, slowest_rank: tuple[str, float] | None) -> None:
        """Add the next step, and the rank that the others waited for."""
        speed = record.tokens_per_second, record.seconds
        self._rows.append((record.step, record.train_loss, record.grad_norm, record.lr, *speed, slowest_rank))
        if record.sample:
            self._samples.append(record.sample)
        if len(self._rows) == 2 * FOLDED_STEPS:
            self._fold()

    def curve(self) -> Curve:
        """Return the curve of the steps so far, without held-out losses."""
        found = zip(*self._rows, strict=True) if self._rows else ((),) * len(_COLUMNS)
        columns: dict[str, Any] = dict(zip(_COLUMNS, found, strict=True))
        return Curve(beginning=self._beginning, samples=tuple(self._samples), **columns)

    def _fold(self) -> None:
        before, curve = self._beginning, self.curve()
        steps, losses = curve.steps[:FOLDED_STEPS], curve.train_losses[:FOLDED_STEPS]
        rates, speeds = curve.learning_rates[:FOLDED_STEPS], curve.tokens_per_second[:FOLDED_STEPS]
        is_first, broken = before.first_step is None, np.flatnonzero(~np.isfinite(losses)).tolist()
        self._beginning = CurveBeginning(
            last_steps=(*before.last_steps, *steps[LARGEST_WINDOW - 1 :: LARGEST_WINDOW]),
            train_losses=(*before.train_losses, *_medians(losses)),
            tokens_per_second=(*before.tokens_per_second, *_medians(speeds)),
            first_step=steps[0] if is_first else before.first_step,
            first_lr=rates[0] if is_first else before.first_lr,
            highest_lr=max(before.highest_lr, *rates),
            broken_step=steps[broken[0]] if broken and before.broken_step is None else before.broken_step,
            jump_step=jump_step(curve, np.asarray(curve.train_losses)),
        )
        del self._rows[:FOLDED_STEPS]


def _medians(values: Sequence[float]) -> list[float]:
    medians: list[float] = np.median(np.reshape(values, (-1, LARGEST_WINDOW)), axis=1).tolist()
    return medians
