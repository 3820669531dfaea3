"""Plots of runs as PNG or SVG: loss, learning rate, gradient norm, speed and ends of attempts; losses of several.

Equal curves give equal bytes, in any thread (no pyplot); a plot is scaled and reads the same at any size.
"""

import io
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cairn.reports.plots import plot_axis, run_curves
from cairn.reports.plots.plot_axis import BASE_POINTS, BLACK, BLUE, GREY, PALE, SMALL_POINTS, Across, PlotAxis, Series
from cairn.reports.plots.run_curves import RunCurves, format_number, format_small_number
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.document import sha256

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLE_POINTS = 12.5
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.82, 0.16, 0.76, 0.84  # margins in inches
_FOOTER_AT, _LEGEND_AT, _LEGEND_ROW, _LEGEND_COLUMNS = 0.13, 0.24, 0.19, 5
_MANY = 30  # more ends of one reason than this would hide the others: they become ticks at the bottom
_MARKED_POINTS = 60
_END_DASHES = (0, (6, 2, 1, 2))
ComparedAcross = Literal["step", "tokens", "time"]
_COLORS = (BLUE, plot_axis.ORANGE, plot_axis.GREEN, plot_axis.VERMILLION, plot_axis.PURPLE, plot_axis.SKY, BLACK, GREY)
_DASHES = ("solid", "dashed", "dotted", "dashdot")
_LABELS = {"step": "step", "tokens": "tokens", "time": "time of training in seconds"}


def plot_run(log: RunLog, request: run_curves.PlotRequest) -> run_curves.WrittenPlot:
    """Draw a run that was read into the file; raises `InvalidConfiguration` where the file cannot be written."""
    curves = run_curves.gather_curves(log)
    draw = draw_svg if request.file.suffix.lower() == ".svg" else draw_png
    image = draw(curves, width_px=request.width_px, height_px=request.height_px, across=request.across)
    run_curves.replace_file(request.file, image)
    return run_curves.WrittenPlot(
        run_id=curves.run_id,
        file=str(request.file),
        bytes=len(image),
        sha256=sha256(image),
        width_px=request.width_px,
        height_px=request.height_px,
        last_step=curves.last_step,
        attempts=curves.attempts,
        interruptions=dict(curves.reasons),
    )


def draw_png(curves: RunCurves, *, width_px: int = 1200, height_px: int = 900, across: Across = "step") -> bytes:
    """Return the plot as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas: Any = FigureCanvasAgg(_figure(curves, width_px, height_px, across))
    canvas.draw()
    drawn, image = Image.fromarray(np.asarray(canvas.buffer_rgba())), io.BytesIO()
    drawn.convert("RGB").quantize(256).save(image, format="png", optimize=True)
    return image.getvalue()


def draw_svg(curves: RunCurves, *, width_px: int = 1200, height_px: int = 900, across: Across = "step") -> bytes:
    """Return the plot as SVG; matplotlib's options are changed while it is written."""
    import matplotlib

    figure = _figure(curves, width_px, height_px, across)
    image = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": curves.run_id, "svg.fonttype": "path"}):
        figure.savefig(image, format="svg", metadata={"Date": None, "Creator": None})
    return image.getvalue()


def _figure(curves: RunCurves, width_px: int, height_px: int, across: Across) -> "Figure":
    figure = plot_axis.make_figure(width_px, height_px)
    axis = PlotAxis(curves=curves, across=across, height_inches=figure.get_figheight())
    panels = _panels(figure, axis)
    draw_loss(panels[0], axis)
    norm = axis.series("grad_norm").finite
    below = (
        (_draw_learning_rate, axis.series("lr").finite),
        (_draw_gradient_norm, norm.where(norm.values > 0)),
        (_draw_speed, axis.series("tokens_per_second").finite),
    )
    for panel, (draw, series) in zip(panels[1:], below, strict=True):
        if len(series.steps):
            draw(panel, series)
        else:
            panel.set_yticks([])
    for panel in panels:
        _draw_events(panel, axis)
    _draw_texts(figure, axis)
    return figure


def _panels(figure: "Figure", axis: PlotAxis) -> "list[Axes]":
    legend_rows = max(1, -(-len(_event_handles(axis)) // _LEGEND_COLUMNS))
    grid = figure.add_gridspec(
        4,
        1,
        height_ratios=(4.6, 1, 1, 1),
        left=_LEFT / plot_axis.LAYOUT_INCHES,
        right=1 - _RIGHT / plot_axis.LAYOUT_INCHES,
        top=1 - _TOP / axis.height_inches,
        bottom=(_BOTTOM + _LEGEND_ROW * (legend_rows - 1)) / axis.height_inches,
        hspace=0.14,
    )
    panels = [figure.add_subplot(grid[row]) for row in range(4)]
    from matplotlib.ticker import MaxNLocator

    for panel in panels:
        panel.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
        panel.set_xlim(-0.01 * axis.reach, 1.02 * axis.reach)
        panel.tick_params(labelsize=SMALL_POINTS, labelbottom=panel is panels[-1], length=3)
        panel.xaxis.set_major_formatter(lambda number, _: format_number(number))
        panel.grid(True, color="#ebebeb", linewidth=0.6)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    for panel in panels[1:]:
        panel.locator_params(axis="y", nbins=3, min_n_ticks=2)
    panels[-1].set_xlabel("tokens" if axis.unit > 1 else "step", fontsize=BASE_POINTS, labelpad=1)
    names = ("loss (nats per token)", "learning\nrate", "gradient\nnorm", "tokens / s")
    for panel, name in zip(panels, names, strict=True):
        panel.set_ylabel(name, fontsize=BASE_POINTS if panel is panels[0] else SMALL_POINTS)
        panel.yaxis.set_label_coords(-0.068, 0.5)
    if rate := axis.curves.tokens_per_step:
        factor = 1 / rate if axis.unit > 1 else rate
        functions = (lambda x: np.asarray(x) * factor, lambda x: np.asarray(x) / factor)
        other = panels[0].secondary_xaxis("top", functions=functions)
        other.xaxis.set_major_formatter(lambda number, _: format_number(number))
        other.tick_params(labelsize=SMALL_POINTS, length=3)
        other.set_xlabel("step" if axis.unit > 1 else "tokens", fontsize=BASE_POINTS, labelpad=3)
        other.spines["top"].set_color(PALE)
    return panels


def _draw_learning_rate(panel: "Axes", rate: Series) -> None:
    thin = plot_axis.thin_out(rate, columns=plot_axis.COLUMNS)
    panel.plot(thin.steps, thin.values, color=BLUE, linewidth=1.3)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(lambda number, _: format_small_number(number))


def _draw_gradient_norm(panel: "Axes", norm: Series) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = float(norm.values.min()) / 1.5, float(norm.values.max()) * 1.5
    panel.set_ylim(low, high)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 9 * low else (1.0, 3.0), numticks=4))
    panel.yaxis.set_major_formatter(lambda number, _: format_small_number(number))
    panel.yaxis.set_minor_locator(NullLocator())
    _plot_with_trend(panel, norm)


def _draw_speed(panel: "Axes", speed: Series) -> None:
    _plot_with_trend(panel, speed)
    panel.set_ylim(0, 1.15 * max(float(np.quantile(speed.values, 0.99)), 1e-9))
    panel.yaxis.set_major_formatter(lambda number, _: format_number(number))


def _plot_with_trend(panel: "Axes", series: Series) -> None:
    thin, trend = plot_axis.thin_out(series, columns=plot_axis.COLUMNS), plot_axis.smooth(series)
    panel.plot(thin.steps, thin.values, color=BLUE, alpha=0.3, linewidth=0.6)
    panel.plot(trend.steps, trend.values, color=BLUE, linewidth=1.3)


def _draw_events(panel: "Axes", axis: PlotAxis) -> None:
    """Draw what all panels show: steps trained again, ends of attempts, the end of the run."""
    height = panel.get_xaxis_transform()
    spans = [((item.first_step - 1) * axis.unit, item.last_step * axis.unit) for item in axis.curves.replays]
    widths = [(first, last - first) for first, last in spans]
    panel.broken_barh(widths, (0, 1), transform=height, facecolor=PALE, alpha=0.55, linewidth=0, zorder=0.5)
    for rank, (reason, count) in enumerate(axis.curves.reasons):  # the rarest last and so on top
        color, style = plot_axis.reason_style(reason)
        steps = axis.places(reason)
        top, width = (0.06, 0.6) if count > _MANY else (1.0, 1.2)
        panel.vlines(
            steps, 0, top, transform=height, color=color, linestyle=style, linewidth=width, zorder=3 + rank / 20
        )
    if axis.curves.end is not None:
        panel.axvline(axis.curves.end.step * axis.unit, color=BLACK, linewidth=1.0, linestyle=_END_DASHES)


def _draw_texts(figure: "Figure", axis: PlotAxis) -> None:
    curves, height = axis.curves, axis.height_inches
    title, state = run_curves.format_title(curves), run_curves.describe_state(curves)
    facts = run_curves.describe_run(curves)
    left, right, top = 0.1 / plot_axis.LAYOUT_INCHES, 1 - _RIGHT / plot_axis.LAYOUT_INCHES, 1 - 0.12 / height
    texts = [
        figure.text(left, top, title, fontsize=_TITLE_POINTS, fontweight="bold", va="top"),
        figure.text(right, top, state, fontsize=_TITLE_POINTS - 1, color=GREY, va="top", ha="right"),
        figure.text(left, _FOOTER_AT / height, facts, fontsize=SMALL_POINTS, color=GREY, va="center"),
    ]
    plot_axis.disable_math(texts)
    if handles := _event_handles(axis):
        legend = figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(left - 0.02 / plot_axis.LAYOUT_INCHES, _LEGEND_AT / height),
            borderaxespad=0,
            ncols=_LEGEND_COLUMNS,
            fontsize=SMALL_POINTS,
            frameon=False,
            handlelength=1.6,
            columnspacing=1.3,
        )
        plot_axis.disable_math(legend.get_texts())


def _event_handles(axis: PlotAxis) -> "list[Artist]":
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = []
    curves = axis.curves
    for reason, count in curves.reasons:
        color, style = plot_axis.reason_style(reason)
        handles.append(Line2D([], [], color=color, linestyle=style, linewidth=2, label=f"{reason} × {count:,}"))
    if again := sum(item.last_step - item.first_step + 1 for item in curves.replays):
        handles.append(Patch(facecolor=PALE, label=f"trained again: {again:,} step{'s' if again > 1 else ''}"))
    if curves.end is not None:
        label = f"stopped early at step {curves.end.step:,}" if curves.end.stopped else "finished"
        handles.append(Line2D([], [], color=BLACK, linewidth=1.0, linestyle=_END_DASHES, label=label))
    return handles


def draw_loss(panel: "Axes", axis: PlotAxis) -> None:
    """Draw the panel of losses: every step, the smoothed loss, held-out losses, the best checkpoint and promotions."""
    raw, probe, curves = axis.series("train_loss"), axis.series("probe_loss"), axis.curves
    trend, thin = plot_axis.smooth(raw), plot_axis.thin_out(raw, columns=plot_axis.COLUMNS)
    mark = "." if len(thin.steps) < 3 else ""
    panel.plot(thin.steps, thin.values, color=BLUE, alpha=0.4, linewidth=0.6, marker=mark, label="train, each step")
    panel.plot(trend.steps, trend.values, color=BLUE, linewidth=1.9, label="train, smoothed")
    before = plot_axis.smooth(axis.series("train_loss", inherited=True))
    if curves.inherited:
        panel.plot(before.steps, before.values, color=GREY, linewidth=1.4, label=f"run {curves.parent}, before")
    if len(probe.finite.steps):
        kept = plot_axis.thin_out(probe, columns=plot_axis.COLUMNS)
        panel.plot(kept.steps, kept.values, color=plot_axis.GREEN, alpha=0.6, linewidth=1.0, label="held-out, probe")
    held = [item for item in curves.held_out if np.isfinite(item.val_loss)]
    steps, losses = [item.step * axis.unit for item in held], [item.val_loss for item in held]
    if curves.best is not None:
        color, mark = plot_axis.VERMILLION, "o" if len(held) <= _MARKED_POINTS else ""
        label = "held-out, evaluations"
        panel.plot(steps, losses, color=color, linewidth=1.3, marker=mark, markersize=4, zorder=6, label=label)
        at, best = [curves.best.step * axis.unit], curves.best
        ring: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 10, "markerfacecolor": "none"}
        label = f"best: {best.val_loss:.4g} at step {best.step:,}"
        panel.plot(at, [best.val_loss], **ring, markeredgecolor=color, markeredgewidth=1.4, zorder=7, label=label)
    _fit_loss(panel, raw, [*trend.values, *before.values, *losses])
    bad = raw.where(~raw.is_finite).steps
    if len(bad):
        shown = plot_axis.thin_out(Series(steps=bad, values=np.zeros_like(bad)), columns=plot_axis.COLUMNS // 8).steps
        cross: dict[str, Any] = {"linestyle": "none", "marker": "x", "markersize": 5, "color": BLACK, "zorder": 9}
        height, label = panel.get_xaxis_transform(), f"loss not finite × {len(bad):,}"
        panel.plot(shown, np.full(len(shown), 0.975), transform=height, **cross, label=label)
    _draw_promotions(panel, axis)
    if not curves.last_step:
        panel.set_yticks([])
        panel.text(0.5, 0.5, "no step recorded yet", transform=panel.transAxes, ha="center", color=GREY)
        return
    legend = panel.legend(loc="upper right", fontsize=SMALL_POINTS, framealpha=0.9, edgecolor=PALE)
    legend.set_zorder(10)
    plot_axis.disable_math(legend.get_texts())


def _fit_loss(panel: "Axes", raw: Series, drawn: Sequence[float]) -> None:
    """Fit the axis to what is drawn plot_axis.smooth; single spikes far above it are cut off."""
    values = raw.finite.values
    shown = np.array([*drawn, *(np.quantile(values, (0.001, 0.995)) if len(values) else ())])
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


def _draw_promotions(panel: "Axes", axis: PlotAxis) -> None:
    losses = {item.step: item.val_loss for item in axis.curves.held_out}
    low, before = panel.get_ylim()[0], "promoted before"
    for item in sorted(axis.curves.promotions, key=lambda item: item.current):
        loss = losses.get(item.step, item.val_loss)
        panel.plot(
            [item.step * axis.unit],
            [low if loss is None or not np.isfinite(loss) else loss],
            linestyle="none",
            marker="*",
            markersize=14 if item.current else 9,
            markerfacecolor=plot_axis.YELLOW if item.current else "white",
            markeredgecolor=BLACK,
            markeredgewidth=0.9,
            clip_on=False,
            zorder=8,
            label=f"{item.alias}: step {item.step:,}" if item.current else before,
        )
        before = before if item.current else "_nolegend_"  # one line for all of them


def plot_comparison(logs: Sequence[RunLog], request: run_curves.PlotRequest, across: ComparedAcross) -> int:
    """Draw runs that were read into one file; returns its size in bytes."""
    figure = plot_axis.make_figure(request.width_px, request.height_px)
    panel = figure.add_subplot()
    shown = list[plot_axis.Column]()
    for place, curves in enumerate(map(run_curves.gather_curves, logs)):
        color, dashes = _COLORS[place % len(_COLORS)], _DASHES[place // len(_COLORS) % len(_DASHES)]
        records = [point.record for point in curves.points]
        steps = np.array([record.step for record in records], dtype=np.float64)
        positions = steps * (curves.tokens_per_step or 1) if across == "tokens" else steps
        if across == "time":
            positions = np.array(list(accumulate(record.seconds for record in records)), dtype=np.float64)
        losses = np.array([record.train_loss for record in records], dtype=np.float64)
        trend = plot_axis.smooth(Series(steps=positions, values=losses))
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
    plot_axis.disable_math(legend.get_texts())
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format=request.file.suffix.lower().removeprefix("."))
    run_curves.replace_file(request.file, image.getvalue())
    return len(image.getvalue())
