"""The plot of a run as a Prefect artifact: Markdown with the PNG inside, and when to draw it again.

Prefect stores every version, so a long run must not draw often; drawing takes at most a twentieth of one core.
"""

import base64
from dataclasses import dataclass

from reports.plots.curve_labels import describe_run
from reports.plots.run_curves import gather_curves
from storage.logs.run_log import RunLog

_WIDTH_PX, _HEIGHT_PX = 900, 600
_LEAST_SECONDS = 60.0
_SHARE_OF_AGE = 0.05
_PAUSE_PER_COST = 20.0
_GREATEST_STEP = 250_000  # more step records need memory that the trainer may need


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """When a plot was drawn on the monotonic clock, how long it took, and how many attempts had ended."""

    at_seconds: float
    cost_seconds: float
    ended_attempts: int


def is_due(before: Drawing | None, *, now_seconds: float, age_seconds: float, ended_attempts: int) -> bool:
    """Return whether to draw again `age_seconds` after the flow began; the end of an attempt makes it due sooner."""
    if before is None:
        return True
    wait = max(_LEAST_SECONDS, _PAUSE_PER_COST * before.cost_seconds)
    if ended_attempts == before.ended_attempts:
        wait = max(wait, _SHARE_OF_AGE * age_seconds)
    return now_seconds - before.at_seconds >= wait


def curve_markdown(log: RunLog) -> str | None:
    """Return the plot and a line about the run that was read; None before the first recorded step."""
    if log.state.high_water_step > _GREATEST_STEP:
        return f"A run of more than {_GREATEST_STEP:,} steps is not drawn here: `cairn plot {log.run_id} curve.png`"
    curves = gather_curves(log)
    if not curves.points:
        return None
    from reports.plots.curve_plot import draw_png  # numpy and matplotlib: only where something is drawn

    image = base64.b64encode(draw_png(curves, width_px=_WIDTH_PX, height_px=_HEIGHT_PX)).decode()
    return f"![curves of {curves.run_id}](data:image/png;base64,{image})\n\n{describe_run(curves)}"
