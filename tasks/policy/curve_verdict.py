"""The verdict on a loss curve: a pure function to the worst rule that holds, its numbers, and the usual cures.

Sources: spikes: PaLM, section 5.1 (2022). Learning rates, warm-up and clipping: OPT-175B, section 2.5 (2022), and
GPT-3, appendix B (2020). Clipping as an exception: Pascanu et al., section 3.2 (2013). Overfitting: Prechelt, Early
Stopping, 1998. Repetition: Welleck et al., Unlikelihood Training (2019).
"""

import math
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path

import numpy as np

from cairn.storage.logs.run_entries import CurveVerdict
from cairn.tasks.policy import curve_statistics
from cairn.tasks.text.format import format_count, format_steps


class VerdictKind(StrEnum):
    """The verdicts, by their stored words."""

    HEALTHY = "healthy"
    TOO_EARLY = "too-early"
    PLATEAU = "plateau"
    SPIKING = "spiking"
    CLIPPING = "clipping"
    REPEATING = "repeating"
    SLOW = "slow"
    STRAGGLING = "straggling"
    OVERFITTING = "overfitting"
    STUCK = "stuck"
    DIVERGING = "diverging"


_FEWEST_STEPS, _FEWEST_STUCK_STEPS = 10, 20
# Diverging: above the best level by all three, or above ln(vocabulary) by the guess share.
_RISE_SHARE, _RISE_ERRORS, _RISE_NATS = 0.05, 6.0, 0.1
_GUESS_SHARE = 0.1
# Stuck: at most this share below ln(vocabulary); the frequencies of tokens alone bring text far below that.
_STUCK_SHARE = 0.05
# Spiking: a step above the median of the 16 before it by both, and a loud gradient.
_SPIKE_SIGMAS, _SPIKE_SHARE = 8.0, 0.1
# Overfitting: held-out over train loss at least the ratio; the gap is enough if the held-out loss rose above its best.
_OVERFIT_RATIO, _OVERFIT_GAP, _OVERFIT_RISE, _OVERFIT_EVALUATIONS = 1.3, 1.05, 0.02, 3
# Plateau: improvement of the held-out loss below the share, or of the train loss over the last two thirds of the run of
# at least so many steps, and since a jump.
_PLATEAU_SHARE, _PLATEAU_EVALUATIONS = 0.005, 5
_FLAT_SHARE, _FLAT_STEPS = 0.02, 200
# A learning rate is dead below this share of its maximum.
_DEAD_SHARE = 0.001
# Clipping: after warm-up the median norm is so many times grad_clip. Healthy runs of small batches have up to twice.
_CLIPPED_RATIO, _CLIPPED_STEPS, _CLIPPED_LOOK_BACK = 3.0, 50, 10_000
# Slow: fewer tokens/s than this share of the median for so many steps in a row that took so many seconds. Evaluation
# and staging beside training cost less, and a slow step or two needs no action.
_SLOW_SHARE, _SLOW_STEPS, _SLOW_SECONDS = 0.25, 5, 10.0
_FEWEST_RATES, _USUAL_STEPS = 20, 1000
# Straggling: in most of the newest steps one and the same rank works for so much longer than the median one.
_STRAGGLING_STEPS, _STRAGGLING_SHARE, _STRAGGLING_RATIO = 200, 0.6, 1.25
# Repeating: this share of the pieces of 16 characters occurred before in the same sample. English is below 0.02.
_PIECE_CHARACTERS, _REPEATED_SHARE = 16, 0.5

Curve = curve_statistics.Curve
_IN_EFFECT: Mapping[str, Callable[[Curve], bool]] = {
    "clips": lambda curve: 0 < curve.grad_clip <= 1.0,
    "falls-to-zero": lambda curve: curve.min_lr == 0 or _has_dead_rate(curve),
    "ends-above-zero": lambda curve: curve.min_lr != 0 or _has_dead_rate(curve),
    "rate-is-alive": lambda curve: not _has_dead_rate(curve),
    "stops-without-improvement": lambda curve: curve.patience > 0,
    "stops-early": lambda curve: curve.patience > 0 or curve.overfit_ratio > 0,
    "has-one-thread": lambda curve: curve.threads == 1,
}
"""When a cure is not named, by the words of curve_verdict.toml."""


def _has_dead_rate(curve: Curve) -> bool:
    rates = curve.learning_rates
    return len(rates) > 0 and rates[-1] < _DEAD_SHARE * max(max(rates), curve.beginning.highest_lr)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    curve: Curve
    losses: curve_statistics.Floats
    since_step: int
    level: curve_statistics.Level
    spikes: curve_statistics.Spikes
    uniform: float
    val: tuple[tuple[int, float], ...]
    train_at_val: tuple[float, ...]


def judge(curve: Curve) -> CurveVerdict:
    """Return the verdict on a curve of any length; the worst rule that holds gives the reason, symptoms are added."""
    losses = np.asarray(curve.train_losses, dtype=np.float64)
    broken, step = np.flatnonzero(~np.isfinite(losses)), curve.beginning.broken_step
    if len(broken) or step is not None:
        step = int(curve.steps[int(broken[0])]) if step is None else step
        return _verdict(curve, VerdictKind.DIVERGING, f"the train loss at step {step} is not a number", {"step": step})
    if len(losses) < _FEWEST_STEPS:
        why = f"{len(losses)} steps are on record; a verdict needs {_FEWEST_STEPS}"
        return _verdict(curve, VerdictKind.TOO_EARLY, why, {"steps": len(losses)})
    # Of many held-out losses, the newest 200 and the best are kept.
    val = [(step, loss) for step, loss in curve.val if step >= curve.first_step]
    val = [*([min(val[:-200], key=lambda point: point[1])] if val[200:] else []), *val[-200:]]
    since = curve_statistics.jump_step(curve, losses)
    seen = _Measured(
        curve=curve,
        losses=losses,
        since_step=since,
        level=curve_statistics.level_of(curve, losses, since_step=since),
        spikes=curve_statistics.spikes_of(curve, losses, sigmas=_SPIKE_SIGMAS, share=_SPIKE_SHARE),
        uniform=math.log(curve.vocab_size) if curve.vocab_size > 1 else 0.0,
        val=tuple(val),
        train_at_val=curve_statistics.levels_at(curve, losses, [step for step, _ in val]),
    )
    symptoms = dict(_find_symptoms(curve))
    for kind, why in chain(_find_problems(seen), symptoms.items()):
        if why:
            others = (text for other, text in symptoms.items() if other is not kind)
            return _verdict(curve, kind, "; also: ".join([why, *others]), _numbers(seen))
    level, end = seen.level, "no evaluation yet"
    if seen.val:
        loss, train = seen.val[-1][1], seen.train_at_val[-1]
        end = f"val loss {loss:.2f} is {loss / max(train, 1e-9):.2f} × train loss {train:.2f}"
    now = f"train loss {level.now:.2f} (median of the last {level.window_steps} steps), best before {level.best:.2f}"
    return _verdict(curve, VerdictKind.HEALTHY, f"{now}; {end}", _numbers(seen))


def _find_problems(seen: _Measured) -> Iterator[tuple[VerdictKind, str]]:
    """Yield the rules from the worst on, each with the reason, or "" if it does not hold."""
    curve, level, rates, val = seen.curve, seen.level, seen.curve.learning_rates, [loss for _, loss in seen.val]
    if val and not math.isfinite(val[-1]):
        yield VerdictKind.DIVERGING, f"the val loss at step {seen.val[-1][0]} is not a number"
    now = f"train loss {level.now:.2f} (median of the last {level.window_steps} steps)"
    margin = max(_RISE_SHARE * level.best, _RISE_ERRORS * level.standard_error, _RISE_NATS)
    if level.now > level.best + margin:
        above = f"{level.now - level.best:.2f} nats above {level.best:.2f} at step {level.best_step}"
        yield VerdictKind.DIVERGING, f"{now} lies {above}; up to {margin:.2f} would be noise"
    guess = f"ln({curve.vocab_size}) = {seen.uniform:.2f} nats"
    if seen.uniform and level.now > seen.uniform * (1 + _GUESS_SHARE):
        yield VerdictKind.DIVERGING, f"{now} is worse than a uniform guess, {guess}"
    if seen.uniform and level.now >= seen.uniform * (1 - _STUCK_SHARE):
        rate = f"; the learning rate is {rates[-1]:.3g}" if rates else ""
        after = f"train loss {level.now:.2f} after {curve.count} steps"
        near = f"{after} is near {guess}, the loss of a uniform guess{rate}"
        # The learning rate rose, and its maximum lies within the newest window.
        first = curve.beginning.first_lr if curve.beginning.count else rates[0] if len(rates) else 0.0
        is_rising = len(rates) > 0 and rates[-1] > first and curve.steps_since_highest_lr() <= level.window_steps
        if is_rising or curve.count < _FEWEST_STUCK_STEPS:
            yield VerdictKind.TOO_EARLY, f"{near}; warm-up is not over"
        yield VerdictKind.STUCK, near
    yield VerdictKind.OVERFITTING, _overfitting(seen)
    if (spikes := seen.spikes).count:
        norm = f", gradient norm {spikes.worst_grad_ratio:.1f} × its median" if spikes.worst_grad_ratio else ""
        found = f"{format_count(spikes.count, 'spike')} of the train loss in the last {spikes.looked_back_steps} steps"
        worst = f"the worst at step {spikes.worst_step}: {spikes.worst_rise:.2f} nats above the steps before it"
        yield VerdictKind.SPIKING, f"{found}, {worst} (noise {spikes.noise:.2f} nats{norm})"
    since = seen.since_step + level.window_steps if seen.since_step else 0
    steps = sorted({curve.step_at(curve.count // 3), since} - {0})
    then, step = max(zip(curve_statistics.levels_at(curve, seen.losses, steps), steps, strict=True))
    if curve.steps[-1] - steps[-1] >= _FLAT_STEPS - 1 and level.now > then * (1 - _FLAT_SHARE):
        before = f"{then:.3f} at step {step}, {curve.steps[-1] - step} steps ago"
        improves = f"train loss {level.now:.3f} improves on {before}"
        yield VerdictKind.PLATEAU, f"{improves}, by less than {_FLAT_SHARE:.0%}"
    count = _PLATEAU_EVALUATIONS
    if len(val) > count and min(val[-count:]) > min(val[:-count]) * (1 - _PLATEAU_SHARE):
        newest = f"the best val loss of the last {count} evaluations, {min(val[-count:]):.3f}"
        improves = f"{newest}, improves on {min(val[:-count]):.3f} before them"
        yield VerdictKind.PLATEAU, f"{improves} by less than {_PLATEAU_SHARE:.1%}"


def _overfitting(seen: _Measured) -> str:
    count, val, train = _OVERFIT_EVALUATIONS, [loss for _, loss in seen.val], seen.train_at_val
    best = int(np.argmin(val)) if val else 0
    if len(val) <= count or len(val) - 1 - best < count:
        return ""
    recent = val[-count:]
    ratios = [loss / max(other, 1e-9) for loss, other in zip(recent, train[-count:], strict=True)]
    has_risen = min(recent) > val[best] * (1 + _OVERFIT_RISE) and min(ratios) > _OVERFIT_GAP
    if train[-1] >= train[best] * (1 - _OVERFIT_RISE) or not (has_risen or min(ratios) >= _OVERFIT_RATIO):
        return ""
    now = f"val loss {val[-1]:.2f} is {ratios[-1]:.2f} × train loss {train[-1]:.2f}"
    since = f"it was never better than at step {seen.val[best][0]} ({val[best]:.2f})"
    return f"{now}; over the last {count} evaluations {since}, while the train loss fell from {train[best]:.2f}"


def _find_symptoms(curve: Curve) -> Iterator[tuple[VerdictKind, str]]:
    """Yield what losses do not show, each with the reason."""
    newest = min(curve.steps_since_highest_lr(), _CLIPPED_LOOK_BACK)
    norms = [norm for norm in curve.grad_norms[-newest:] if norm is not None] if newest else []
    median = float(np.median(norms)) if len(norms) >= _CLIPPED_STEPS else 0.0
    if curve.grad_clip and median >= _CLIPPED_RATIO * curve.grad_clip:
        share = sum(norm > curve.grad_clip for norm in norms) / len(norms)
        of_clip = f"grad_clip {curve.grad_clip:g} (median {median:.3g}, {median / curve.grad_clip:.1f} times it)"
        longer = f"{share:.0%} of the last {len(norms):,} gradients were longer than {of_clip}"
        yield VerdictKind.CLIPPING, f"{longer} and were clipped to it"
    samples, width = curve.samples[-curve_statistics.SAMPLES :], _PIECE_CHARACTERS
    if len(samples) == curve_statistics.SAMPLES:
        pieces = [[text[i : i + width] for i in range(len(text) - width + 1)] for text in samples]
        least = min(1 - len(set(of_one)) / max(len(of_one), 1) if of_one else 0.0 for of_one in pieces)
        if len(set(samples)) == 1:
            yield VerdictKind.REPEATING, f"the newest {curve_statistics.SAMPLES} samples are the same text"
        elif least >= _REPEATED_SHARE:
            each = f"at least {least:.0%} of each of the newest {curve_statistics.SAMPLES} samples"
            yield VerdictKind.REPEATING, f"{each} repeats what stands before it in the sample"
    if slow := _collapsed_throughput(curve):
        yield VerdictKind.SLOW, slow
    ranks = [item for item in curve.slowest_ranks[-_STRAGGLING_STEPS:] if item]
    late = Counter(name for name, ratio in ranks if ratio >= _STRAGGLING_RATIO)
    name, count = late.most_common(1)[0] if late else ("", 0)
    if len(ranks) >= _FEWEST_RATES and count >= _STRAGGLING_SHARE * len(ranks):
        ratio = float(np.median([ratio for other, ratio in ranks if other == name]))
        work = f"its own work took it {ratio:.1f} times as long as the median rank, and the others wait for it"
        yield VerdictKind.STRAGGLING, f"{name} was the slowest in {count} of the last {len(ranks)} steps: {work}"


def _collapsed_throughput(curve: Curve) -> str:
    """Return where the newest span of the steps kept whole ran far below the run's own median, or "" where none did."""
    rates = np.asarray(curve.tokens_per_second, dtype=np.float64)
    if len(rates) < _FEWEST_RATES:
        return ""
    usual: Sequence[float] | curve_statistics.Floats = rates
    if curve.beginning.count:
        blocks = rates[len(rates) % curve_statistics.LARGEST_WINDOW :].reshape(-1, curve_statistics.LARGEST_WINDOW)
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


def _numbers(seen: _Measured) -> dict[str, float]:
    level, spikes = seen.level, seen.spikes
    numbers = {
        "steps": seen.curve.count,
        "window_steps": level.window_steps,
        "train_loss": level.now,
        "best_train_loss": level.best,
        "best_train_step": level.best_step,
        "noise_nats": spikes.noise,
        "spikes": spikes.count,
    }
    if seen.uniform:
        numbers["uniform_guess_nats"] = seen.uniform
    if spikes.count:
        numbers |= {"worst_spike_step": spikes.worst_step, "worst_spike_nats": spikes.worst_rise}
    if seen.val:
        best = min(seen.val, key=lambda point: point[1])
        numbers |= {"val_loss": seen.val[-1][1], "best_val_loss": best[1], "best_val_step": best[0]}
        numbers["val_over_train"] = seen.val[-1][1] / max(seen.train_at_val[-1], 1e-9)
    return numbers


def _verdict(curve: Curve, kind: VerdictKind, why: str, numbers: Mapping[str, float]) -> CurveVerdict:
    usual = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).get(kind, ())
    cures = tuple(cure["say"] for cure in usual if "unless" not in cure or not _IN_EFFECT[cure["unless"]](curve))
    finite = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
    return CurveVerdict(kind=kind.value, why=why, numbers=finite, cures=cures)


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
