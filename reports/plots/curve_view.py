"""The curves of a run for a browser: thinned columns over steps, with the seconds of training up to each step."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from reports.plots.colors import Dashes, reason_style
from reports.plots.plot_axis import PlotAxis, Series, smooth, thin_out
from reports.plots.run_curves import PromotedPoint, Replay, RunCurves
from storage.stores.document import project

COLUMNS = 600
"""Columns of the drawing; each keeps at most four points of a curve."""
_DRAWN = ("train_loss", "lr", "grad_norm", "tokens_per_second")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A curve: values over steps, and the seconds that were trained up to each step."""

    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedAttempts:
    """Where attempts ended for one reason, in what colour and line a plot shows it, and how many there were."""

    reason: str
    count: int
    color: str
    dashes: Dashes
    trace: Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveView:
    """What a browser draws of one run; `traces` by name, empty ones left out, `inherited` from before a fork."""

    run_id: str
    state: str
    total_steps: int
    tokens_per_step: int
    parent: str
    traces: Mapping[str, Trace]
    ends: tuple[EndedAttempts, ...]
    replays: tuple[Replay, ...]
    promotions: tuple[PromotedPoint, ...]
    end_step: int | None


def view_curves(curves: RunCurves, *, columns: int = COLUMNS) -> CurveView:
    """Return the curves as a browser draws them, each thinned to what so many columns can show."""
    axis, records = PlotAxis(curves=curves, across="step", height_inches=0), [point.record for point in curves.points]
    steps = np.array([records[0].step - 1 if records else 0, *(record.step for record in records)], dtype=np.float64)
    seconds = np.array([0, *(record.seconds for record in records)], dtype=np.float64)
    clock = Series(steps=steps, values=np.cumsum(np.where(np.isfinite(seconds), seconds, 0.0)))  # a fork begins at 0
    whole = {name: axis.series(name) for name in _DRAWN}
    drawn = {name: thin_out(series, columns=columns) for name, series in whole.items()}
    drawn["trend"] = smooth(whole["train_loss"])
    drawn["inherited"] = thin_out(axis.series("train_loss", inherited=True), columns=columns)
    pairs = [(point.step, point.val_loss) for point in curves.held_out]
    steps, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    drawn["val_loss"] = Series(steps=steps, values=values).finite
    ends = []
    for reason, count in curves.reasons:
        (color, dashes), places = reason_style(reason), np.array(axis.places(reason), dtype=np.float64)
        trace = _trace(Series(steps=places, values=np.zeros(len(places))), clock)
        ends.append(EndedAttempts(reason=reason, count=count, color=color, dashes=dashes, trace=trace))
    return project(
        curves,
        CurveView,
        traces={name: _trace(series, clock) for name, series in drawn.items() if len(series.steps)},
        ends=tuple(ends),
        end_step=curves.end.step if curves.end else None,
    )


def _trace(series: Series, clock: Series) -> Trace:
    seconds = np.interp(series.steps, clock.steps, clock.values)
    columns = (np.round(series.steps, 1), np.round(seconds, 3), series.values)
    steps, times, values = (tuple(map(float, column.tolist())) for column in columns)
    return Trace(steps=steps, seconds=times, values=values)
