"""Robust statistics of a loss curve (medians and median absolute deviations), and symptoms that losses do not show.

Sources: Huber, Robust Statistics, 1981; the work is bounded: of a long curve only the newest steps are whole, those
before them are blocks of medians. Clipping as an exception: Pascanu et al., section 3.2 (2013). Repetition: Welleck et
al., Unlikelihood Training (2019).
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cairn.storage.logs.step_log import StepRecord
from cairn.tasks.text.format import format_steps

Floats = NDArray[np.float64]

LARGEST_WINDOW = 200
_SPIKE_WINDOW = 16
# Clipping: half of the steps after warm-up shortened. Then the norm, and not lr, decides how far the weights move.
_CLIPPED_SHARE, _CLIPPED_STEPS, _CLIPPED_LOOK_BACK = 0.5, 50, 10_000
# Slow: fewer tokens/s than this share of the median for so many steps in a row that took so many seconds. Evaluation
# and staging beside training cost less, and a slow step or two needs no action.
_SLOW_SHARE, _SLOW_STEPS, _SLOW_SECONDS = 0.25, 5, 10.0
_FEWEST_RATES, _USUAL_STEPS = 20, 1000
# Straggling: in most of the newest steps one and the same rank works for so much longer than the median one.
_STRAGGLING_STEPS, _STRAGGLING_SHARE, _STRAGGLING_RATIO = 200, 0.6, 1.25
# Repeating: this share of the pieces of 16 characters occurred before in the same sample. English is below 0.02.
_PIECE_CHARACTERS, _REPEATED_SHARE, SAMPLES = 16, 0.5, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveBeginning:
    """The steps before those of a long curve, in blocks of 200: the last step of each, medians of losses and speeds.

    `highest_lr` and `first_lr` are those of all these steps, `broken_step` the first one whose loss is not finite.
    """

    last_steps: Sequence[int] = ()
    train_losses: Sequence[float] = ()
    tokens_per_second: Sequence[float] = ()
    first_step: int | None = None
    first_lr: float = 0.0
    highest_lr: float = 0.0
    broken_step: int | None = None

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
    `grad_clip` 0 that nothing is clipped. `beginning` has the steps before these, if the curve is long.
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


def level_of(curve: Curve, losses: Floats) -> Level:
    """Return the level now and the best one before, over windows counted back from the newest step; needs two."""
    window, beginning = _window(curve.count), curve.beginning
    blocks = losses[len(losses) % window :].reshape(-1, window)  # (blocks, window), the newest last
    medians = np.median(blocks, axis=1)
    best = int(np.argmin(medians[:-1]))
    last_of_best = len(losses) % window + (best + 1) * window - 1
    noise = _deviation((blocks - medians[:, None])[-20:].ravel())
    before = min(zip(beginning.train_losses, beginning.last_steps, strict=True), default=(np.inf, 0))
    best_loss, best_step = min((float(medians[best]), int(curve.steps[last_of_best])), before, key=lambda pair: pair[0])
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
    noise = _deviation(rise)
    found = np.flatnonzero(rise > np.maximum(sigmas * noise, share * np.abs(base)))
    if not len(found):
        return Spikes(count=0, looked_back_steps=looked_back, noise=noise)
    worst = int(found[np.argmax(rise[found])])
    index = count - looked_back + worst
    around = curve.grad_norms[max(0, index - LARGEST_WINDOW) : index + LARGEST_WINDOW]
    known = [norm for norm in around if norm is not None and np.isfinite(norm)]
    norm = curve.grad_norms[index] if curve.grad_norms else None
    middle = float(np.median(known)) if known else 0.0
    return Spikes(
        count=int(1 + np.count_nonzero(np.diff(found) > _SPIKE_WINDOW)),  # steps within one window are one spike
        looked_back_steps=looked_back,
        noise=noise,
        worst_step=int(curve.steps[index]),
        worst_rise=float(rise[worst]),
        worst_grad_ratio=norm / middle if norm is not None and np.isfinite(norm) and middle > 0 else 0.0,
    )


class ThroughputWatch:
    """Says while training runs far below its own median; slow steps do not enter the median."""

    def __init__(self) -> None:
        self._usual = deque[float](maxlen=_USUAL_STEPS)
        self._slow = deque[float](maxlen=_SLOW_STEPS)
        self._slow_seconds = 0.0

    def add(self, tokens_per_second: float, seconds: float) -> str:
        """Add a step; return how slow the newest steps are, or "" while they are not."""
        median = float(np.median(self._usual)) if len(self._usual) >= _FEWEST_RATES else 0.0
        if tokens_per_second >= _SLOW_SHARE * median:
            self._usual.append(tokens_per_second)
            self._slow.clear()
            self._slow_seconds = 0.0
            return ""
        self._slow.append(tokens_per_second)
        self._slow_seconds += seconds
        if len(self._slow) < _SLOW_STEPS or self._slow_seconds < _SLOW_SECONDS:
            return ""
        slow = float(np.median(self._slow))
        return f"training runs at {slow:,.0f} tokens/s, {slow / median:.0%} of its own median of {median:,.0f}"


def find_clipped_updates(curve: Curve) -> str:
    """Return that most updates are clipped, or "" if they are not or nothing is known of norms."""
    if not curve.grad_clip or not curve.grad_norms or not curve.learning_rates:
        return ""
    newest = min(curve.steps_since_highest_lr(), _CLIPPED_LOOK_BACK)
    norms = [norm for norm in curve.grad_norms[-newest:] if norm is not None]
    share = sum(norm > curve.grad_clip for norm in norms) / max(len(norms), 1)
    if len(norms) < _CLIPPED_STEPS or share < _CLIPPED_SHARE:
        return ""
    longer = f"longer than grad_clip {curve.grad_clip:g} (median {float(np.median(norms)):.3g})"
    return f"{share:.0%} of the last {len(norms):,} gradients were {longer} and were clipped to it"


def find_collapsed_throughput(curve: Curve) -> str:
    """Return where the newest span of the steps kept whole ran far below the run's own median, or "" where none did."""
    rates = np.asarray(curve.tokens_per_second, dtype=np.float64)
    if len(rates) < _FEWEST_RATES:
        return ""
    usual: Sequence[float] | Floats = rates
    if curve.beginning.count:
        blocks = rates[len(rates) % LARGEST_WINDOW :].reshape(-1, LARGEST_WINDOW)
        usual = [*curve.beginning.tokens_per_second, *np.median(blocks, axis=1)]
    median = float(np.median(usual))
    is_slow = np.concatenate([[False], rates < _SLOW_SHARE * median, [False]])
    borders: Sequence[int] = np.flatnonzero(np.diff(is_slow)).tolist()  # first index and end of each slow span
    for first, end in reversed(list(zip(borders[::2], borders[1::2], strict=True))):
        slow = float(np.median(rates[first:end]))
        if end - first >= _SLOW_STEPS and sum(curve.seconds[first:end]) >= _SLOW_SECONDS:
            where = format_steps(int(curve.steps[first]), int(curve.steps[end - 1]))
            return f"{where} ran at {slow:,.0f} tokens/s, {slow / median:.0%} of the run's median of {median:,.0f}"
    return ""


def find_straggler(curve: Curve) -> str:
    """Return which rank the others wait for in most of the newest steps, or "" where none stands out."""
    newest = [item for item in curve.slowest_ranks[-_STRAGGLING_STEPS:] if item]
    if len(newest) < _FEWEST_RATES:
        return ""
    late = [name for name, ratio in newest if ratio >= _STRAGGLING_RATIO]
    name, count = Counter(late).most_common(1)[0] if late else ("", 0)
    if count < _STRAGGLING_SHARE * len(newest):
        return ""
    ratio = float(np.median([ratio for other, ratio in newest if other == name]))
    work = f"its own work took it {ratio:.1f} times as long as the median rank, and the others wait for it"
    return f"{name} was the slowest in {count} of the last {len(newest)} steps: {work}"


def find_repeating_samples(curve: Curve) -> str:
    """Return that each of the newest samples of text repeats itself, or all are the same; "" otherwise."""
    newest = curve.samples[-SAMPLES:]
    if len(newest) < SAMPLES:
        return ""
    if len(set(newest)) == 1:
        return f"the newest {SAMPLES} samples are the same text"
    width = _PIECE_CHARACTERS
    pieces = [[text[i : i + width] for i in range(len(text) - width + 1)] for text in newest]
    least = min(1 - len(set(of_one)) / max(len(of_one), 1) if of_one else 0.0 for of_one in pieces)
    if least < _REPEATED_SHARE:
        return ""
    return f"at least {least:.0%} of each of the newest {SAMPLES} samples repeats what stands before it in the sample"


def _window(count: int) -> int:
    """Return the window of a level, in steps, for a curve of `count` steps."""
    return int(np.clip(count // 10, 5, LARGEST_WINDOW))


def _deviation(values: Floats) -> float:
    """Return the standard deviation of a normal distribution with this median absolute deviation."""
    return float(1.4826 * np.median(np.abs(values - np.median(values))))


FOLDED_STEPS = 20_000
"""So many steps become blocks once twice as many are whole: the same steps always make the same curve."""


class CurveFold:
    """A curve to which steps are added in order."""

    def __init__(self) -> None:
        self._beginning, self._samples = CurveBeginning(), deque[str](maxlen=SAMPLES)
        self._steps, self._losses, self._norms = list[int](), list[float](), list[float | None]()
        self._rates, self._speeds, self._seconds = list[float](), list[float](), list[float]()
        self._slowest = list[tuple[str, float] | None]()

    def add(self, record: StepRecord, slowest_rank: tuple[str, float] | None) -> None:
        """Add the next step, and the rank that the others waited for."""
        self._steps.append(record.step)
        self._losses.append(record.train_loss)
        self._norms.append(record.grad_norm)
        self._rates.append(record.lr)
        self._speeds.append(record.tokens_per_second)
        self._seconds.append(record.seconds)
        self._slowest.append(slowest_rank)
        if record.sample:
            self._samples.append(record.sample)
        if len(self._steps) == 2 * FOLDED_STEPS:
            self._fold()

    def curve(self) -> Curve:
        """Return the curve of the steps so far, without held-out losses."""
        return Curve(
            beginning=self._beginning,
            steps=tuple(self._steps),
            train_losses=tuple(self._losses),
            grad_norms=tuple(self._norms),
            learning_rates=tuple(self._rates),
            tokens_per_second=tuple(self._speeds),
            seconds=tuple(self._seconds),
            slowest_ranks=tuple(self._slowest),
            samples=tuple(self._samples),
        )

    def _fold(self) -> None:
        before, steps, losses = self._beginning, self._steps[:FOLDED_STEPS], self._losses[:FOLDED_STEPS]
        is_first, broken = before.first_step is None, np.flatnonzero(~np.isfinite(losses))
        broken_step = steps[int(broken[0])] if len(broken) and before.broken_step is None else before.broken_step
        self._beginning = CurveBeginning(
            last_steps=(*before.last_steps, *steps[LARGEST_WINDOW - 1 :: LARGEST_WINDOW]),
            train_losses=(*before.train_losses, *_medians(losses)),
            tokens_per_second=(*before.tokens_per_second, *_medians(self._speeds[:FOLDED_STEPS])),
            first_step=steps[0] if is_first else before.first_step,
            first_lr=self._rates[0] if is_first else before.first_lr,
            highest_lr=max(before.highest_lr, *self._rates[:FOLDED_STEPS]),
            broken_step=broken_step,
        )
        for column in (self._steps, self._losses, self._norms, self._rates, self._speeds, self._seconds, self._slowest):
            del column[:FOLDED_STEPS]


def _medians(values: list[float]) -> list[float]:
    medians: list[float] = np.median(np.reshape(values, (-1, LARGEST_WINDOW)), axis=1).tolist()
    return medians
