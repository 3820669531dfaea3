"""The axis that all panels of a plot share: steps or tokens, and the columns of the step records on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from reports.plots.curve_reduction import Series
from reports.plots.run_curves import RunCurves
from storage.logs.step_log import StepPoint

Across = Literal["step", "tokens"]

BASE_POINTS, SMALL_POINTS = 9.0, 8.0
COLUMNS = 1200


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotAxis:
    """The curves of a run over steps or tokens; all values are in units of the axis."""

    curves: RunCurves
    across: Across
    height_inches: float

    @property
    def unit(self) -> float:
        """The length of one step on the axis."""
        return self.curves.tokens_per_step if self.across == "tokens" and self.curves.tokens_per_step else 1

    def series(self, name: str) -> Series:
        """Return a column of the step records; steps without a value are left out."""
        return self._column(name, self.curves.points)

    def inherited(self, name: str) -> Series:
        """Return a column of the steps before a fork."""
        return self._column(name, self.curves.inherited)

    def _column(self, name: str, points: Sequence[StepPoint]) -> Series:
        found = [getattr(point.record, name) for point in points]
        kept = np.array([value is not None for value in found], dtype=np.bool_)
        steps = np.array([point.record.step for point in points], dtype=np.float64)
        return Series(steps=steps * self.unit, values=np.array(found, dtype=np.float64)).where(kept)

    @property
    def reach(self) -> float:
        """The end of the axis: everything recorded lies before it."""
        happened = [self.curves.last_step, *(item.step for item in self.curves.interruptions)]
        end = [self.curves.end.step] if self.curves.end else []
        farthest = max([*happened, *end])
        return (farthest or self.curves.total_steps or 1) * self.unit

    def places(self, reason: str) -> Sequence[float]:
        """Return where attempts ended for this reason, at most one place a pixel column."""
        unit, reach = self.unit, self.reach
        places = [item.step * unit for item in self.curves.interruptions if item.reason == reason]
        return sorted({round(place * COLUMNS / reach): place for place in places}.values())
