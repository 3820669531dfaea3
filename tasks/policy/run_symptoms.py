"""Symptoms that losses do not show: clipping, repetition, collapsed throughput and stragglers.

Sources: clipping as an exception: Pascanu et al., section 3.2 (2013). Repetition: Welleck et al., Unlikelihood
Training (2019).
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

import numpy as np

from cairn.tasks.policy.curve_statistics import LARGEST_WINDOW, SAMPLES, Curve, Floats
from cairn.tasks.text.format import format_steps

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


def find_symptoms(curve: Curve) -> Iterator[tuple[str, str]]:
    """Yield the symptoms that the curve has, each by the word of its verdict with the reason."""
    newest = min(curve.steps_since_highest_lr(), _CLIPPED_LOOK_BACK)
    norms = [norm for norm in curve.grad_norms[-newest:] if norm is not None] if newest else []
    median = float(np.median(norms)) if len(norms) >= _CLIPPED_STEPS else 0.0
    if curve.grad_clip and median >= _CLIPPED_RATIO * curve.grad_clip:
        share = sum(norm > curve.grad_clip for norm in norms) / len(norms)
        of_clip = f"grad_clip {curve.grad_clip:g} (median {median:.3g}, {median / curve.grad_clip:.1f} times it)"
        longer = f"{share:.0%} of the last {len(norms):,} gradients were longer than {of_clip}"
        yield "clipping", f"{longer} and were clipped to it"
    samples, width = curve.samples[-SAMPLES:], _PIECE_CHARACTERS
    if len(samples) == SAMPLES:
        pieces = [[text[i : i + width] for i in range(len(text) - width + 1)] for text in samples]
        least = min(1 - len(set(of_one)) / max(len(of_one), 1) if of_one else 0.0 for of_one in pieces)
        if len(set(samples)) == 1:
            yield "repeating", f"the newest {SAMPLES} samples are the same text"
        elif least >= _REPEATED_SHARE:
            each = f"at least {least:.0%} of each of the newest {SAMPLES} samples"
            yield "repeating", f"{each} repeats what stands before it in the sample"
    if slow := _collapsed_throughput(curve):
        yield "slow", slow
    ranks = [item for item in curve.slowest_ranks[-_STRAGGLING_STEPS:] if item]
    late = Counter(name for name, ratio in ranks if ratio >= _STRAGGLING_RATIO)
    name, count = late.most_common(1)[0] if late else ("", 0)
    if len(ranks) >= _FEWEST_RATES and count >= _STRAGGLING_SHARE * len(ranks):
        ratio = float(np.median([ratio for other, ratio in ranks if other == name]))
        work = f"its own work took it {ratio:.1f} times as long as the median rank, and the others wait for it"
        yield "straggling", f"{name} was the slowest in {count} of the last {len(ranks)} steps: {work}"


def _collapsed_throughput(curve: Curve) -> str:
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
