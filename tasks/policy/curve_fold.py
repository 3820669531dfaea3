"""The curve of a run as it grows, in bounded memory: what a verdict needs of a million steps."""

from collections import deque

import numpy as np

from cairn.storage.logs.step_log import StepRecord
from cairn.tasks.policy.curve_statistics import LARGEST_WINDOW, SAMPLES, Curve, CurveBeginning

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
