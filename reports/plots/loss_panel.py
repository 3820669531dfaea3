"""The panel of losses: every step, the smoothed loss, held-out losses, the best checkpoint and promotions."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from reports.plots.colors import BLACK, BLUE, GREEN, GREY, PALE, VERMILLION, YELLOW
from reports.plots.curve_reduction import Series, smooth, thin_out
from reports.plots.plot_axis import COLUMNS, SMALL_POINTS, PlotAxis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

_MARKED_POINTS = 60


def draw_loss(panel: "Axes", axis: PlotAxis) -> None:
    """Draw the lines, marks and legend of the panel."""
    raw, probe = axis.series("train_loss"), axis.series("probe_loss")
    trend = smooth(raw)
    thin = thin_out(raw, columns=COLUMNS)
    mark = "." if len(thin.steps) < 3 else ""
    panel.plot(thin.steps, thin.values, color=BLUE, alpha=0.4, linewidth=0.6, marker=mark, label="train, each step")
    panel.plot(trend.steps, trend.values, color=BLUE, linewidth=1.9, label="train, smoothed")
    if axis.curves.inherited:
        before = smooth(axis.inherited("train_loss"))
        panel.plot(before.steps, before.values, color=GREY, linewidth=1.4, label=f"run {axis.curves.parent}, before")
    if len(probe.finite.steps):
        kept = thin_out(probe, columns=COLUMNS)
        panel.plot(kept.steps, kept.values, color=GREEN, alpha=0.6, linewidth=1.0, label="held-out, probe")
    _draw_held_out(panel, axis)
    _fit_loss(panel, raw, trend, axis)
    _draw_not_finite(panel, raw)
    _draw_promotions(panel, axis)
    if not axis.curves.last_step:
        panel.set_yticks([])
        panel.text(0.5, 0.5, "no step recorded yet", transform=panel.transAxes, ha="center", color=GREY)
        return
    legend = panel.legend(loc="upper right", fontsize=SMALL_POINTS, framealpha=0.9, edgecolor=PALE)
    legend.set_zorder(10)
    disable_math(legend.get_texts())


def _draw_held_out(panel: "Axes", axis: PlotAxis) -> None:
    points, best = [item for item in axis.curves.held_out if np.isfinite(item.val_loss)], axis.curves.best
    if best is None:
        return
    steps = [item.step * axis.unit for item in points]
    mark = "o" if len(points) <= _MARKED_POINTS else ""
    panel.plot(
        steps,
        [item.val_loss for item in points],
        color=VERMILLION,
        linewidth=1.3,
        marker=mark,
        markersize=4,
        zorder=6,
        label="held-out, evaluations",
    )
    panel.plot(
        [best.step * axis.unit],
        [best.val_loss],
        linestyle="none",
        marker="o",
        markersize=10,
        markerfacecolor="none",
        markeredgecolor=VERMILLION,
        markeredgewidth=1.4,
        zorder=7,
        label=f"best: {best.val_loss:.4g} at step {best.step:,}",
    )


def _fit_loss(panel: "Axes", raw: Series, trend: Series, axis: PlotAxis) -> None:
    """Fit the axis to the smoothed loss; single spikes far above it are cut off."""
    values = raw.finite.values
    held = [item.val_loss for item in axis.curves.held_out if np.isfinite(item.val_loss)]
    before = smooth(axis.inherited("train_loss")).values
    ends = np.quantile(values, (0.001, 0.995)) if len(values) else ()
    shown = np.array([*trend.values, *before, *held, *ends])
    if not len(shown):
        panel.set_yticks([])
        return
    low, high = float(shown.min()), float(shown.max())
    if low > 0 and high > 25 * low:
        panel.set_ylim(low / 1.15, high * 1.3)
        panel.set_yscale("log")
        return
    margin = 0.06 * (high - low) or 0.5
    panel.set_ylim(low - margin, high + margin)


def _draw_not_finite(panel: "Axes", raw: Series) -> None:
    bad = raw.where(~raw.is_finite).steps
    if len(bad):
        shown = thin_out(Series(steps=bad, values=np.zeros_like(bad)), columns=COLUMNS // 8).steps
        panel.plot(
            shown,
            np.full(len(shown), 0.975),
            transform=panel.get_xaxis_transform(),
            linestyle="none",
            marker="x",
            markersize=5,
            color=BLACK,
            zorder=9,
            label=f"loss not finite × {len(bad):,}",
        )


def _draw_promotions(panel: "Axes", axis: PlotAxis) -> None:
    losses = {item.step: item.val_loss for item in axis.curves.held_out}
    low = panel.get_ylim()[0]
    before = "promoted before"
    for item in sorted(axis.curves.promotions, key=lambda item: item.current):
        loss = losses.get(item.step, item.val_loss)
        panel.plot(
            [item.step * axis.unit],
            [low if loss is None or not np.isfinite(loss) else loss],
            linestyle="none",
            marker="*",
            markersize=14 if item.current else 9,
            markerfacecolor=YELLOW if item.current else "white",
            markeredgecolor=BLACK,
            markeredgewidth=0.9,
            clip_on=False,
            zorder=8,
            label=f"{item.alias}: step {item.step:,}" if item.current else before,
        )
        before = before if item.current else "_nolegend_"  # one line for all of them


def disable_math(texts: "Iterable[Text]") -> None:
    """Switch off formulas: a dollar sign in a name is a dollar sign."""
    for text in texts:
        text.set_parse_math(False)
