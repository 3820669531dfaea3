"""Plots of runs as PNG or SVG: loss, learning rate, gradient norm, speed and ends of attempts; losses of several.

Equal curves give equal bytes, in any thread (no pyplot); a plot is scaled and reads the same at any size.
"""

import io
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cairn.reports.plots import plot_axis, run_curves
from cairn.reports.plots.plot_axis import BLACK, BLUE, GREY, PALE, PlotAxis, Series
from cairn.reports.queries import run_comparison
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.codec import sha256

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES = 8.0
_MANY = 30  # more ends of one reason than this would hide the others: they become ticks at the bottom
_MARKED_POINTS = 60
_END_DASHES = (0, (6, 2, 1, 2))
_DASHES = ("solid", "dashed", "dotted", "dashdot")
_LABELS = {"step": "step", "tokens": "tokens", "time": "time of training in seconds"}


def plot_run(log: RunLog, file: Path, *, width_px: int, height_px: int, across: str) -> run_curves.WrittenPlot:
    """Draw a run that was read into the file; raises `InvalidConfiguration` where the file cannot be written."""
    form, curves = run_curves.plot_form(file, width=width_px, height=height_px), run_curves.gather_curves(log)
    image = draw_run(curves, form=form, width_px=width_px, height_px=height_px, across=across)
    return run_curves.WrittenPlot(
        run_id=curves.run_id,
        file=str(file),
        bytes=run_curves.write_output(file, image),
        sha256=sha256(image),
        width_px=width_px,
        height_px=height_px,
        last_step=curves.last_step,
        attempts=curves.attempts,
        interruptions=dict(curves.reasons),
    )


def draw_run(
    curves: run_curves.RunCurves, *, form: str = "png", width_px: int = 1200, height_px: int = 900, across: str = "step"
) -> bytes:
    """Return the plot as PNG or SVG."""
    figure, axis = _make_figure(width_px, height_px), PlotAxis(curves=curves, across=across)
    panels = figure.subplots(4, 1, sharex=True, height_ratios=(4.6, 1, 1, 1))
    _label_panels(panels, axis)
    draw_loss(panels[0], axis)
    norm = axis.series("grad_norm").finite
    below = (
        (_draw_learning_rate, axis.series("lr").finite),
        (_draw_gradient_norm, norm.where(norm.values > 0)),
        (_draw_speed, axis.series("tokens_per_second").finite),
    )
    for panel, (draw, series) in zip(panels[1:], below, strict=True):
        panel.locator_params(axis="y", nbins=3, min_n_ticks=2)
        if len(series.steps):
            draw(panel, series, axis)
        else:
            panel.set_yticks([])
    for panel in panels:
        _draw_events(panel, axis)
    panels[0].set_title(run_curves.format_title(curves), loc="left", fontweight="bold")
    panels[0].set_title(run_curves.describe_state(curves), loc="right", color=GREY)
    shown, title = panels[-1].get_legend_handles_labels(), run_curves.describe_run(curves)
    style: Any = {"alignment": "left", "ncols": 5, "frameon": False, "handlelength": 1.6, "columnspacing": 1.3}
    figure.legend(*shown, title=title, loc="outside lower left", **style).get_title().set_color(GREY)
    figure.align_ylabels()
    return _save(figure, form)


def _make_figure(width_px: int, height_px: int) -> "Figure":
    """Return an empty figure of this size, eight inches wide."""
    from matplotlib.figure import Figure

    _set_style()
    dots = width_px / _WIDTH_INCHES
    # Half a pixel more: the canvas rounds down, and rounding may go below.
    return Figure(figsize=(_WIDTH_INCHES, (height_px + 0.5) / dots), dpi=dots, layout="constrained")


@cache
def _set_style() -> None:
    """Set the style of plots: matplotlib has read a `matplotlibrc`, the one of the working folder before others."""
    import matplotlib

    matplotlib.rcdefaults()
    style = str(files("cairn.reports.plots") / "curves.mplstyle")
    matplotlib.rcParams.update(matplotlib.rc_params_from_file(style, fail_on_error=True, use_default_template=False))


def _save(figure: "Figure", form: str) -> bytes:
    image = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    figure.savefig(image, format=form, metadata=metadata)
    return image.getvalue()


def _label_panels(panels: "Sequence[Axes]", axis: PlotAxis) -> None:
    """Label all axes; steps and tokens are the axes below and above."""
    panels[0].locator_params(axis="x", integer=True)  # shared by all panels
    panels[0].xaxis.set_major_formatter(lambda number, _: run_curves.format_number(number))
    panels[0].set_xlim(-0.01 * axis.reach, 1.02 * axis.reach)
    panels[-1].set_xlabel("tokens" if axis.unit > 1 else "step")
    names = ("loss (nats per token)", "learning\nrate", "gradient\nnorm", "tokens / s")
    for panel, name in zip(panels, names, strict=True):
        panel.set_ylabel(name)
    if rate := axis.curves.tokens_per_step:
        factor = 1 / rate if axis.unit > 1 else rate
        functions = (lambda x: np.asarray(x) * factor, lambda x: np.asarray(x) / factor)
        other = panels[0].secondary_xaxis("top", functions=functions)
        other.xaxis.set_major_formatter(lambda number, _: run_curves.format_number(number))
        other.set_xlabel("step" if axis.unit > 1 else "tokens")
        other.spines["top"].set(visible=True, color=PALE)


def _draw_learning_rate(panel: "Axes", rate: Series, _: PlotAxis) -> None:
    _plot(panel, rate, linewidth=1.3)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter("{x:.3g}")


def _draw_gradient_norm(panel: "Axes", norm: Series, axis: PlotAxis) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = float(norm.values.min()) / 1.5, float(norm.values.max()) * 1.5
    panel.set_ylim(low, high)
    panel.set_yscale("log")
    few = LogLocator(subs=(1.0, 2.0, 5.0) if high < 9 * low else (1.0, 3.0), numticks=4)
    panel.yaxis.set_major_locator(MaxNLocator(3) if high < 4.5 * low else few)
    panel.yaxis.set_major_formatter("{x:.3g}")
    panel.yaxis.set_minor_locator(NullLocator())
    trend = axis.trends("grad_norm")[1]
    _plot_with_trend(panel, norm, trend.where(trend.values > 0))


def _draw_speed(panel: "Axes", speed: Series, axis: PlotAxis) -> None:
    _plot_with_trend(panel, speed, axis.trends("tokens_per_second")[1])
    panel.set_ylim(0, 1.15 * max(float(np.quantile(speed.values, 0.99)), 1e-9))
    panel.yaxis.set_major_formatter(lambda number, _: run_curves.format_number(number))


def _plot_with_trend(panel: "Axes", series: Series, trend: Series) -> None:
    _plot(panel, series, alpha=0.3, linewidth=0.6)
    _plot(panel, trend, linewidth=1.3)


def _plot(panel: "Axes", series: Series, *, color: str = BLUE, **style: Any) -> None:
    """Draw a curve, thinned to what its pixel columns can show."""
    thin = plot_axis.thin_out(series, columns=plot_axis.COLUMNS)
    mark = "o" if len(thin.steps) == 1 else ""  # a line of one point is invisible
    panel.plot(thin.steps, thin.values, color=color, marker=mark, **style)


def _draw_events(panel: "Axes", axis: PlotAxis) -> None:
    """Draw what all panels show: steps trained again, ends of attempts, the end of the run."""
    height, curves = panel.get_xaxis_transform(), axis.curves
    if again := sum(item.last_step - item.first_step + 1 for item in curves.replays):
        spans = [((item.first_step - 1) * axis.unit, item.last_step * axis.unit) for item in curves.replays]
        widths = [(first, last - first) for first, last in spans]
        label = f"trained again: {again:,} step{'s' if again > 1 else ''}"
        style: dict[str, Any] = {"color": PALE, "alpha": 0.55, "linewidth": 0, "zorder": 0.5, "label": label}
        panel.broken_barh(widths, (0, 1), transform=height, **style)
    for rank, (reason, count) in enumerate(curves.reasons):  # the rarest last and so on top
        color, dashes, letter = plot_axis.reason_style(reason)
        top, width = (0.06, 0.6) if count > _MANY else (1.0, 1.2)
        style = {"color": color, "linestyle": dashes, "linewidth": width, "zorder": 3 + rank / 20}
        panel.vlines(axis.places(reason), 0, top, transform=height, label=f"{letter}  {reason} × {count:,}", **style)
    if curves.end is not None:
        label = f"stopped early at step {curves.end.step:,}" if curves.end.stopped else "finished"
        panel.axvline(curves.end.step * axis.unit, color=BLACK, linewidth=1.0, linestyle=_END_DASHES, label=label)


def draw_loss(panel: "Axes", axis: PlotAxis) -> None:
    """Draw the panel of losses: every step, the smoothed loss, held-out losses, the best checkpoint and promotions."""
    raw, probe, curves = axis.series("train_loss"), axis.series("probe_loss"), axis.curves
    before, trend = axis.trends("train_loss")
    _plot(panel, raw, alpha=0.4, linewidth=0.6, label="train, each step")
    _plot(panel, trend, linewidth=1.9, label="train, smoothed")
    if curves.inherited:
        _plot(panel, before, color=GREY, linewidth=1.4, label=f"{' → '.join(curves.ancestors)}, before")
    if len(probe.finite.steps):
        _plot(panel, probe, color=plot_axis.GREEN, alpha=0.6, linewidth=1.0, label="held-out, probe")
    held = [item for item in curves.held_out if np.isfinite(item.val_loss)]
    steps, losses = [item.step * axis.unit for item in held], [item.val_loss for item in held]
    if (best := curves.best) is not None:
        style: dict[str, Any] = {"color": plot_axis.VERMILLION, "marker": "o" if len(held) <= _MARKED_POINTS else ""}
        panel.plot(steps, losses, **style, linewidth=1.3, markersize=4, zorder=6, label="held-out, evaluations")
        style = {"s": 100, "facecolor": "none", "edgecolor": plot_axis.VERMILLION, "linewidth": 1.4, "zorder": 7}
        label = f"best: {best.val_loss:.4g} at step {best.step:,}"
        panel.scatter(best.step * axis.unit, best.val_loss, **style, label=label)
    usual = np.quantile(raw.finite.values, (0.001, 0.995)) if len(raw.finite.values) else ()
    targets = (mark.loss for mark in curves.marks if mark.is_target)
    _fit_losses(panel, np.array([*trend.values, *before.values, *losses, *usual, *targets]))
    bad = raw.where(~raw.is_finite).steps
    if len(bad):
        shown = plot_axis.thin_out(Series(steps=bad, values=np.zeros_like(bad)), columns=plot_axis.COLUMNS // 8).steps
        style = {"s": 25, "c": BLACK, "marker": "x", "zorder": 9, "label": f"loss not finite × {len(bad):,}"}
        panel.scatter(shown, np.full(len(shown), 0.975), transform=panel.get_xaxis_transform(), **style)
    _draw_marks(panel, curves.marks)
    known, low, others = {item.step: item.val_loss for item in held}, panel.get_ylim()[0], "promoted before"
    for promoted in sorted(curves.promotions, key=lambda item: item.current):
        loss = known.get(promoted.step, promoted.val_loss)
        height = low if loss is None or not np.isfinite(loss) else loss
        size, color = (196, plot_axis.YELLOW) if promoted.current else (81, "white")
        label = f"{promoted.alias}: step {promoted.step:,}" if promoted.current else others
        style = {"edgecolor": BLACK, "linewidth": 0.9, "clip_on": False, "zorder": 8, "label": label}
        panel.scatter(promoted.step * axis.unit, height, s=size, c=color, marker="*", **style)
        others = others if promoted.current else "_nolegend_"  # one line for all of them
    style = {"fontsize": 6.0, "fontweight": "bold", "ha": "right", "va": "top", "zorder": 9}
    for reason, count in curves.reasons:
        color, _, letter = plot_axis.reason_style(reason)
        for place in axis.places(reason) if count <= _MANY else ():
            panel.text(place, 0.99, f"{letter} ", transform=panel.get_xaxis_transform(), color=color, **style)
    if not curves.last_step:
        panel.set_yticks([])
        panel.text(0.5, 0.5, "no step recorded yet", transform=panel.transAxes, ha="center", color=GREY)
        return
    panel.legend(loc="upper right").set_zorder(10)


def _fit_losses(panel: "Axes", shown: plot_axis.Column) -> None:
    """Fit the axis to these losses, with logarithms where they differ much; single spikes far above are cut off."""
    if not len(shown):
        panel.set_yticks([])
        return
    low, high = float(shown.min()), float(shown.max())
    if low > 0 and high > 25 * low:
        panel.set_ylim(low / 1.15, high * 1.3)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:.4g}")
        return
    margin = 0.06 * (high - low) or 0.5
    panel.set_ylim(low - margin, high + margin)


def _draw_marks(panel: "Axes", marks: Iterable[run_curves.LossMark]) -> None:
    """Draw the losses that others are seen against, those that lie within the axis."""
    low, high = panel.get_ylim()
    for mark in (mark for mark in marks if low <= mark.loss <= high):
        dashes = "dashdot" if mark.is_target else "dotted"
        panel.axhline(mark.loss, color=GREY, linewidth=1.0, linestyle=dashes, zorder=2, label=mark.label)


def draw_comparison(logs: Sequence[RunLog], *, form: str = "png", across: str = "step") -> bytes:
    """Return the plot of runs that were read as PNG or SVG."""
    figure = _make_figure(1200, 800)
    panel = figure.add_subplot()
    shown = list[plot_axis.Column]()
    found, ends = [run_curves.gather_curves(log) for log in logs], list[tuple[float, float, str, str]]()
    planned, identities = max(curves.total_steps for curves in found), run_comparison.describe_identities(logs)
    for place, (curves, same) in enumerate(zip(found, identities, strict=True)):
        colors = plot_axis.RUNS
        color, dashes = colors[place % len(colors)], _DASHES[place // len(colors) % len(_DASHES)]
        records = [point.record for point in curves.points]
        steps = np.array([record.step for record in records], dtype=np.float64)
        positions = steps * (curves.tokens_per_step or 1) if across == "tokens" else steps
        if across == "time":
            positions = np.cumsum([record.seconds for record in records], dtype=np.float64)
        trend = PlotAxis(curves=curves, across="step", planned=planned).trends("train_loss")[1]
        across_trend = np.interp(trend.steps, steps, positions) if len(steps) else trend.steps
        named = f"{curves.run_id}, {same}" if same else curves.run_id
        panel.plot(across_trend, trend.values, color=color, linestyle=dashes, linewidth=1.6, label=named)
        ends += [(trend.values[-1], across_trend[-1], curves.run_id, color)] if len(trend.values) else []
        held = [item for item in curves.held_out if len(steps) and np.isfinite(item.val_loss)]
        at = [float(np.interp(item.step, steps, positions)) for item in held]
        values = np.array([item.val_loss for item in held], dtype=np.float64)
        panel.plot(at, values, color=color, linestyle="none", marker="o", markersize=4, label="_nolegend_")
        shown += [trend.values, values]
    _fit_losses(panel, np.concatenate(shown))
    _draw_marks(panel, dict.fromkeys(chain.from_iterable(curves.marks for curves in found)))
    panel.set_xlabel(_LABELS[across])
    panel.set_ylabel("loss (nats per token); dots: held-out")
    panel.legend(loc="upper right")
    above: float = -np.inf
    for value, end, name, color in sorted(ends):  # the name of each line at its end, none over another
        share = panel.transAxes.inverted().transform(panel.transData.transform((end, value)))[1]
        above = max(share, above + 0.035)
        style: dict[str, Any] = {"color": color, "fontsize": 7, "va": "center"}
        panel.text(end, above, f"  {name}", transform=panel.get_xaxis_transform(), **style)
    return _save(figure, form)
