"""Symptoms of a run that its losses do not show: clipped updates, slow steps, one slow rank, samples that repeat.

Sources: clipping as an exception: Pascanu et al., section 3.2 (2013). Repetition as the share of n-grams that occurred
before: Welleck et al., Neural Text Generation with Unlikelihood Training (2019).
"""

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tasks.policy.curve_statistics import Curve
from tasks.text.format import format_steps

# Clipping: half of the steps after warm-up shortened. Then the norm, and not lr, decides how far the weights move.
_CLIPPED_SHARE, _CLIPPED_STEPS, _CLIPPED_LOOK_BACK = 0.5, 50, 10_000
# Slow: fewer tokens/s than this share of the median for so many steps in a row that took so many seconds. Evaluation
# and staging beside training cost less, and what is over within seconds needs nobody.
_SLOW_SHARE, _SLOW_STEPS, _SLOW_SECONDS = 0.25, 5, 10.0
_FEWEST_RATES, _USUAL_STEPS = 20, 1000
# Straggling: in most of the newest steps one and the same rank works for so much longer than the median one.
_STRAGGLING_STEPS, _STRAGGLING_SHARE, _STRAGGLING_RATIO = 200, 0.6, 1.25
# Repeating: this share of the pieces of 16 characters occurred before in the same sample. English is below 0.02.
_PIECE_CHARACTERS, _REPEATED_SHARE, _SAMPLES = 16, 0.5, 3


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
    first = max(int(np.argmax(curve.learning_rates)), len(curve.steps) - _CLIPPED_LOOK_BACK)
    norms = [norm for norm in curve.grad_norms[first:] if norm is not None]
    share = sum(norm > curve.grad_clip for norm in norms) / max(len(norms), 1)
    if len(norms) < _CLIPPED_STEPS or share < _CLIPPED_SHARE:
        return ""
    return (
        f"{share:.0%} of the last {len(norms):,} gradients were longer than grad_clip {curve.grad_clip:g} "
        f"(median {float(np.median(norms)):.3g}) and were clipped to it"
    )


def find_collapsed_throughput(curve: Curve) -> str:
    """Return where the newest stretch of steps ran far below the run's own median, or "" where none did."""
    rates = np.asarray(curve.tokens_per_second, dtype=np.float64)
    if len(rates) < _FEWEST_RATES:
        return ""
    median = float(np.median(rates))
    for first, end in reversed(_stretches(rates < _SLOW_SHARE * median)):
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
    return (
        f"{name} was the slowest in {count} of the last {len(newest)} steps: its own work took it {ratio:.1f} times as "
        "long as the median rank, and the others wait for it"
    )


def find_repeating_samples(curve: Curve) -> str:
    """Return that each of the newest samples of text repeats itself, or all are the same; "" otherwise."""
    newest = curve.samples[-_SAMPLES:]
    if len(newest) < _SAMPLES:
        return ""
    if len(set(newest)) == 1:
        return f"the newest {_SAMPLES} samples are the same text"
    least = min(map(_repeated_share, newest))
    if least < _REPEATED_SHARE:
        return ""
    return f"at least {least:.0%} of each of the newest {_SAMPLES} samples repeats what stands before it in the sample"


def _repeated_share(text: str) -> float:
    pieces = [text[i : i + _PIECE_CHARACTERS] for i in range(len(text) - _PIECE_CHARACTERS + 1)]
    return 1 - len(set(pieces)) / len(pieces) if pieces else 0.0


def _stretches(holds: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the stretches of True as pairs of first index and end, in order."""
    borders: Sequence[int] = np.flatnonzero(np.diff(np.concatenate([[False], holds, [False]]))).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))
