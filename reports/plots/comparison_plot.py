"""The plot of several runs: train loss, smoothed, and held-out losses over steps, tokens or device time."""

import io
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import numpy as np

from cairn.reports.plots.colors import BLACK, BLUE, GREEN, GREY, ORANGE, PALE, PURPLE, SKY, VERMILLION
from cairn.reports.plots.curve_plot import disable_math
from cairn.reports.plots.plot_axis import BASE_POINTS, SMALL_POINTS, Column, Series, make_figure, smooth
from cairn.reports.plots.run_curves import gather_curves
from cairn.reports.plots.run_plot import PlotRequest, replace_file
from cairn.storage.logs.run_log import RunLog

ComparedAcross = Literal["step", "tokens", "time"]
_COLORS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BLACK, GREY)
_DASHES = ("solid", "dashed", "dotted", "dashdot")
_LABELS = {"step": "step", "tokens": "tokens", "time": "time of training in seconds"}


def plot_comparison(logs: Sequence[RunLog], request: PlotRequest, across: ComparedAcross) -> int:
    """Draw runs that were read into one file; returns its size in bytes."""
    figure = make_figure(request.width_px, request.height_px)
    panel = figure.add_subplot()
    shown = list[Column]()
    for place, curves in enumerate(map(gather_curves, logs)):
        color, dashes = _COLORS[place % len(_COLORS)], _DASHES[place // len(_COLORS) % len(_DASHES)]
        records = [point.record for point in curves.points]
        steps = np.array([record.step for record in records], dtype=np.float64)
        positions = steps * (curves.tokens_per_step or 1) if across == "tokens" else steps
        if across == "time":
            positions = np.array(list(accumulate(record.seconds for record in records)), dtype=np.float64)
        losses = np.array([record.train_loss for record in records], dtype=np.float64)
        trend = smooth(Series(steps=positions, values=losses))
        panel.plot(trend.steps, trend.values, color=color, linestyle=dashes, linewidth=1.6, label=curves.run_id)
        held = [item for item in curves.held_out if len(steps) and np.isfinite(item.val_loss)]
        at = [float(np.interp(item.step, steps, positions)) for item in held]
        values = np.array([item.val_loss for item in held], dtype=np.float64)
        panel.plot(at, values, color=color, linestyle="none", marker="o", markersize=4, label="_nolegend_")
        shown += [trend.values, values]
    drawn = np.concatenate(shown)
    if len(drawn) and drawn.min() > 0 and drawn.max() > 25 * drawn.min():
        panel.set_yscale("log")
    panel.set_xlabel(_LABELS[across], fontsize=BASE_POINTS)
    panel.set_ylabel("loss (nats per token); dots: held-out", fontsize=BASE_POINTS)
    panel.tick_params(labelsize=SMALL_POINTS)
    panel.grid(color=PALE, linewidth=0.6)
    legend = panel.legend(loc="upper right", fontsize=SMALL_POINTS, framealpha=0.9, edgecolor=PALE)
    disable_math(legend.get_texts())
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format=request.file.suffix.lower().removeprefix("."))
    replace_file(request.file, image.getvalue())
    return len(image.getvalue())
