"""Parts that all plots of a run share: the axis, steps or tokens, columns of step records, and these for a browser.

Thinning keeps the first, least, greatest and last value of each pixel column (M4, Jugel et al., VLDB 2014).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cairn.reports.plots import run_curves
from cairn.tasks.policy.termination import TerminationReason

Dashes = Literal["solid", "dashed", "dotted", "dashdot"]
ReasonStyle = tuple[str, Dashes, str]
"""Colour, line style and letter: without colours the latter two tell reasons apart."""
# The colours are safe for colour-blind readers (Okabe and Ito, 2008).
BLACK, GREY, PALE = "#000000", "#6b6b6b", "#d9d9d9"
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILLION, PURPLE, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
RUNS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
"""The colours of runs beside each other, in order."""
_REASONS: dict[str, "ReasonStyle"] = {
    TerminationReason.PREEMPTED: (SKY, "solid", "P"),
    TerminationReason.LOST: (ORANGE, "dashdot", "L"),
    TerminationReason.OOM: (PURPLE, "solid", "O"),
    TerminationReason.BAD_DATA: (GREEN, "dotted", "B"),
    TerminationReason.DIVERGED: (BLACK, "dashed", "D"),
    TerminationReason.HUNG: (PURPLE, "dashed", "H"),
    TerminationReason.TOO_FEW_MACHINES: (SKY, "dashed", "M"),
    TerminationReason.STORAGE: (GREEN, "dashed", "S"),
    TerminationReason.ERROR: (BLACK, "solid", "E"),
    TerminationReason.CANCELLED: (GREY, "dashed", "C"),
    TerminationReason.PAUSED: (GREY, "solid", "W"),
    TerminationReason.FENCED: (GREY, "dotted", "F"),
}
COLUMNS = 1200
TRACE_COLUMNS = 600
"""Columns of a browser's drawing; each keeps at most four points of a curve."""
_DRAWN = (
    *("train_loss", "lr", "grad_norm", "tokens_per_second"),
    *("memory_bytes", "rss_bytes", "data_seconds", "disk_free_bytes"),
)
Column = NDArray[np.float64]
_GREATEST, _WINDOW_SHARE = 1e30, 100


def reason_style(reason: str) -> ReasonStyle:
    """Return how a termination reason is drawn; black, dotted and with a question mark where it is unknown."""
    return _REASONS.get(reason, (BLACK, "dotted", "?"))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Series:
    """Values over steps, both of one length, steps ascending."""

    steps: Column
    values: Column

    @property
    def is_finite(self) -> NDArray[np.bool_]:
        """Which values are finite and small enough to be added up and drawn."""
        return np.abs(self.values) < _GREATEST

    @property
    def finite(self) -> "Series":
        """The finite values."""
        return self.where(self.is_finite)

    def where(self, kept: NDArray[np.bool_]) -> "Series":
        """Return the values whose flag in `kept` is true."""
        return Series(steps=self.steps[kept], values=self.values[kept])


def thin_out(series: Series, *, columns: int) -> Series:
    """Return at most four finite values for each of `columns` columns of equal width, and both ends."""
    finite = series.finite
    steps, values = finite.steps, finite.values
    if len(steps) <= 4 * columns:
        return finite
    column = ((steps - steps[0]) * columns / (steps[-1] - steps[0] + 1)).astype(np.int64)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    last = np.append(first[1:], len(steps)) - 1
    by_value = np.lexsort((values, column))
    kept = np.unique(np.concatenate((first, last, by_value[first], by_value[last])))
    return Series(steps=steps[kept], values=values[kept])


def smooth(series: Series, *, planned: int) -> Series:
    """Return the trend, a median and then a mean, each of the values up to a step, a hundredth of those `planned`.

    The same window for all curves of a picture, and none that looks ahead: equal values have equal trends, and what a
    growing curve has shown stays.
    """
    steps, values = series.finite.steps, series.finite.values
    if (width := max(1, -(-planned // COLUMNS))) > 1:
        ends = range(width, len(steps), width)
        medians = ([np.median(it) for it in np.split(column, ends) if len(it)] for column in (steps, values))
        steps, values = map(np.array, medians)
    window = max(2, planned // (_WINDOW_SHARE * width))
    return Series(steps=steps, values=_running(_running(values, window, np.median), window, np.mean))


def _running(values: Column, window: int, middle: Callable[[Column], Any]) -> Column:
    windows = (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    return np.array([middle(one) for one in windows], dtype=np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotAxis:
    """The curves of a run over steps or tokens; all values are in units of the axis.

    `planned` is the longest of the runs in the picture, in steps; 0 for this run alone.
    """

    curves: run_curves.RunCurves
    across: str
    planned: int = 0

    @property
    def unit(self) -> float:
        """The length of one step on the axis."""
        return self.curves.tokens_per_step if self.across == "tokens" and self.curves.tokens_per_step else 1

    def series(self, name: str, *, inherited: bool = False) -> Series:
        """Return a column of the step records, or of those before a fork; steps without a value are left out."""
        points = self.curves.inherited if inherited else self.curves.points
        found = [getattr(point.record, name) for point in points]
        kept = np.array([value is not None for value in found], dtype=np.bool_)
        steps = np.array([point.record.step for point in points], dtype=np.float64)
        return Series(steps=steps * self.unit, values=np.array(found, dtype=np.float64)).where(kept)

    def trends(self, name: str) -> tuple[Series, Series]:
        """Return the trend of a column of the step records: before a fork, and of the run's own steps."""
        before, own = self.series(name, inherited=True), self.series(name)
        steps, values = (np.concatenate(pair) for pair in ((before.steps, own.steps), (before.values, own.values)))
        whole = smooth(Series(steps=steps, values=values), planned=self.planned or self.curves.total_steps)
        is_own = whole.steps > (before.steps[-1] if len(before.steps) else 0)
        return whole.where(~is_own), whole.where(is_own)

    @property
    def reach(self) -> float:
        """The end of the axis: the planned last step, and everything recorded lies before it."""
        ends = [step for steps in self.curves.interruptions.values() for step in steps]
        finished = self.curves.end.step if self.curves.end else 0
        return (max(self.curves.last_step, self.curves.total_steps, finished, *ends) or 1) * self.unit

    def places(self, reason: str) -> Sequence[float]:
        """Return where attempts ended for this reason, at most one place a pixel column."""
        unit, reach = self.unit, self.reach
        places = [step * unit for step in self.curves.interruptions[reason]]
        return sorted({round(place * COLUMNS / reach): place for place in places}.values())


def view_curves(
    curves: run_curves.RunCurves, *, columns: int = TRACE_COLUMNS, planned: int = 0, place: int = 0
) -> dict[str, Any]:
    """Return the curves as a browser draws them, each thinned to what so many columns can show.

    `traces` by name, none empty; `inherited` is before a fork. A trace has values over steps, and the seconds that
    were trained up to each step. Among runs of which the longest has so many `planned` steps it has a `place`.
    """
    axis = PlotAxis(curves=curves, across="step", planned=planned)
    records = [point.record for point in curves.points]
    steps = np.array([records[0].step - 1 if records else 0, *(record.step for record in records)], dtype=np.float64)
    seconds = np.array([0, *(record.seconds for record in records)], dtype=np.float64)
    clock = np.cumsum(np.where(np.isfinite(seconds), seconds, 0.0))  # a fork begins at 0

    def trace(series: Series) -> dict[str, list[float]]:
        times = np.round(np.interp(series.steps, steps, clock), 3)
        return {"steps": series.steps.round(1).tolist(), "seconds": times.tolist(), "values": series.values.tolist()}

    whole = {name: axis.series(name) for name in _DRAWN}
    drawn = {name: thin_out(series, columns=columns) for name, series in whole.items()}
    drawn["trend"] = axis.trends("train_loss")[1]
    drawn["inherited"] = thin_out(axis.series("train_loss", inherited=True), columns=columns)
    pairs = [(point.step, point.val_loss) for point in curves.held_out]
    held_steps, losses = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    drawn["val_loss"] = Series(steps=held_steps, values=losses).finite
    ends = []
    for reason, count in curves.reasons:
        (color, dashes, letter), places = reason_style(reason), np.array(axis.places(reason), dtype=np.float64)
        line = trace(Series(steps=places, values=np.zeros(len(places))))
        style = {"color": color, "dashes": dashes, "letter": letter}
        ends.append({"reason": reason, "count": count, **style, "trace": line})
    return {
        "run_id": curves.run_id,
        "color": RUNS[place % len(RUNS)],
        "total_steps": curves.total_steps,
        "tokens_per_step": curves.tokens_per_step,
        "ancestors": curves.ancestors,
        "traces": {name: trace(series) for name, series in drawn.items() if len(series.steps)},
        "ends": ends,
        "marks": curves.marks,
        "replays": curves.replays,
        "promotions": curves.promotions,
    }
