"""A run's report as a page: Markdown for the terminal, HTML for a file. The pages are Jinja2 templates."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.reports.pages.run_report import RunReport
from cairn.reports.plots import run_curves, run_plot
from cairn.reports.queries import receipts
from cairn.reports.text import display_tables
from cairn.reports.text.display_tables import Table, fence, format_cell, markdown_table, markdown_text
from cairn.tasks.policy.termination import TerminationReason
from cairn.tasks.text import format, output

if TYPE_CHECKING:
    from jinja2 import Environment

_WIDTH_PX, _HEIGHT_PX = 1200, 820
_BARS_WIDTH = 1000
_LEAST_BAR_WIDTH = 1.5
_MOST_BARS = 600
_KNOWN: frozenset[str] = frozenset({*TerminationReason, receipts.OPEN})


def markdown_report(report: RunReport, *, columns: int | None = None) -> str:
    """Return the report as Markdown: text of the run stays text. In a terminal, lines and tables fit its columns."""
    write_table = partial(_lay_out_table, columns=columns) if columns else markdown_table
    pages = _environment(autoescape=False, markdown=markdown_text, markdown_table=write_table, fence=fence)
    parts = _render(pages, "report.md.j2", report).split("```")
    if columns:  # every second part is between fences
        for place, part in list(enumerate(parts))[::2]:
            parts[place] = "\n".join(piece for line in part.split("\n") for piece in output.wrap(line, columns))
    return "```".join(parts)


def _lay_out_table(table: Table, columns: int) -> str:
    rows = [[format_cell(value) for value in row] for row in table.rows]
    return "\n".join(line for lines in output.lay_out(table.columns, rows, columns) for line in lines)


def html_report(report: RunReport, curves: run_curves.RunCurves) -> str:
    """Return the report as one HTML page with the plot inside; equal reports give equal bytes."""
    image = b""
    if report.curve:
        from cairn.reports.plots.curve_plot import (
            draw_png,  # numpy and matplotlib: only where there is something to draw
        )

        image = draw_png(curves, width_px=_WIDTH_PX, height_px=_HEIGHT_PX)
    plot, bars = base64.b64encode(image).decode(), place_bars(report.attempts)
    return _render(html_environment(), "report.html.j2", report, plot=plot, bars=bars, live=False)


def _render(pages: "Environment", name: str, report: RunReport, **context: object) -> str:
    title = f"Run {report.run_id} · {report.model_family}"
    stretches = receipts.group_receipts(report.attempts)
    return pages.get_template(name).render(report=report, title=title, stretches=stretches, **context)


def write_html_report(report: RunReport, curves: run_curves.RunCurves, file: str) -> int:
    """Write the page and return its bytes; raises `InvalidConfiguration` where the file cannot be written."""
    content = html_report(report, curves).encode()
    run_plot.replace_file(Path(file), content)
    return len(content)


def html_environment() -> "Environment":
    """Return the templates of pages, with what they need to show tables; text of a run stays text."""

    def commands(text: str) -> list[str]:
        """Return the text between backquotes at the odd places; text with an unpaired backquote stays whole."""
        parts = format.one_line(text).split("`")
        return parts if len(parts) % 2 else [format.one_line(text)]

    def number_columns(table: Table) -> list[bool]:
        """Return for each column whether all its cells are numbers or nothing."""
        columns = zip(*table.rows, strict=True) if table.rows else [()] * len(table.columns)
        texts = [[format.format_value(cell) for cell in cells if cell is not None] for cells in columns]
        return [
            bool(table.rows) and all(text.replace(",", "").replace(".", "", 1).isdigit() for text in some)
            for some in texts
        ]

    return _environment(autoescape=True, css_class=css_class, commands=commands, number_columns=number_columns)


def _environment(*, autoescape: bool, **filters: Callable[..., object]) -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("cairn.reports.pages"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,  # a server that runs keeps the templates that fit its code
    )
    pages.filters |= {name: getattr(display_tables, name) for name in dir(display_tables) if name.endswith("_table")}
    pages.filters |= filters | {
        "count": format.format_count,
        "duration": format.format_duration,
        "line": format.one_line,
        "listing": format.format_list,
        "plain": format_cell,
        "sanitize": format.sanitize,
        "time": format.format_time,
    }
    return pages


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar: its place and width in units of the drawing, the reason it is coloured by, and its title."""

    left: float
    width: float
    reason: str
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptBars:
    """The drawing, `width` by `height` units, from `begin` to `end`; `reasons` are those that occur, for the legend."""

    bars: tuple[Bar, ...]
    begin: datetime
    end: datetime
    reasons: tuple[str, ...]
    width: int = _BARS_WIDTH
    height: int = 62
    bar_height: int = 34


def place_bars(attempts: Sequence[receipts.Receipt]) -> AttemptBars | None:
    """Return one bar an attempt, above 600 attempts one for each stretch of equal ends; None without attempts."""
    if not attempts:
        return None
    spans = []
    if len(attempts) <= _MOST_BARS:
        for receipt in attempts:
            last, reason = _end_of(receipt), receipt.termination_reason or receipts.OPEN
            steps = f"steps {receipt.first_step:,} to {receipt.last_step:,}"
            lasted = format.format_duration((last - receipt.started_at).total_seconds())
            title = f"attempt {receipt.attempt}: {reason}, {steps}, {lasted}"
            spans.append((receipt.started_at, last, reason, title))
    else:
        for item in receipts.group_receipts(attempts):
            title = f"attempts {item.first.attempt} to {item.last.attempt}: {item.reason}"
            spans.append((item.first.started_at, _end_of(item.last), item.reason, title))
    begin, end = spans[0][0], max(span[1] for span in spans)
    scale = _BARS_WIDTH / ((end - begin).total_seconds() or 1.0)
    bars = []
    for first, last, reason, title in spans:
        width = max((last - first).total_seconds() * scale, _LEAST_BAR_WIDTH)
        left = min((first - begin).total_seconds() * scale, _BARS_WIDTH - width)
        bars.append(Bar(left=left, width=width, reason=reason, title=title))
    return AttemptBars(bars=tuple(bars), begin=begin, end=end, reasons=tuple(dict.fromkeys(span[2] for span in spans)))


def css_class(reason: str) -> str:
    """Return the CSS class that colours a reason, also of `preempted × 214`; `r-other` where it is unknown."""
    name = reason.split(" × ")[0].removesuffix(receipts.INJECTED)
    return f"r-{name}" if name in _KNOWN else "r-other"


def _end_of(receipt: receipts.Receipt) -> datetime:
    """Return when the attempt ended; of an open one, up to when it is known to have trained."""
    trained = timedelta(seconds=receipt.gpu_seconds / receipt.placement.world_size)
    return receipt.ended_at or receipt.started_at + trained
