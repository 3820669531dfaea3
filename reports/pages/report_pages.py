"""A run's report as a page: Markdown for the terminal, HTML for a file. The pages are Jinja2 templates."""

import base64
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reports.pages.attempt_bars import css_class, place_bars
from reports.pages.run_report import RunReport, machines_table, quarantines_table
from reports.plots.run_curves import RunCurves
from reports.plots.run_plot import replace_file
from reports.queries import display_tables
from reports.queries.display_tables import Table, fence, format_cell, markdown_table, markdown_text
from reports.queries.receipts import group_receipts
from tasks.text.format import format_count, format_duration, format_list, format_time, format_value, one_line
from tasks.text.sanitize import sanitize
from tasks.text.table_layout import lay_out, wrap

if TYPE_CHECKING:
    from jinja2 import Environment

_WIDTH_PX, _HEIGHT_PX = 1200, 820


def markdown_report(report: RunReport, *, columns: int | None = None) -> str:
    """Return the report as Markdown: text of the run stays text. In a terminal, lines and tables fit its columns."""
    pages = _environment(autoescape=False)
    write_table = partial(_lay_out_table, columns=columns) if columns else markdown_table
    pages.filters |= {"markdown": markdown_text, "markdown_table": write_table, "fence": fence}
    text = _render(pages, "report.md.j2", report)
    parts = text.split("```")  # every second one is between fences
    return "```".join(
        _wrap_lines(part, columns) if columns and not place % 2 else part for place, part in enumerate(parts)
    )


def _lay_out_table(table: Table, columns: int) -> str:
    rows = [[format_cell(value) for value in row] for row in table.rows]
    return "\n".join(line for lines in lay_out(table.columns, rows, columns) for line in lines)


def _wrap_lines(text: str, columns: int) -> str:
    return "\n".join(part for line in text.split("\n") for part in wrap(line, columns))


def html_report(report: RunReport, curves: RunCurves) -> str:
    """Return the report as one HTML page with the plot inside; equal reports give equal bytes."""
    image = b""
    if report.curve:
        from reports.plots.curve_plot import draw_png  # numpy and matplotlib: only where there is something to draw

        image = draw_png(curves, width_px=_WIDTH_PX, height_px=_HEIGHT_PX)
    plot = base64.b64encode(image).decode()
    return _render(
        html_environment(), "report.html.j2", report, plot=plot, bars=place_bars(report.attempts), live=False
    )


def write_html_report(report: RunReport, curves: RunCurves, file: str) -> int:
    """Write the page and return its bytes; raises `InvalidConfiguration` where the file cannot be written."""
    content = html_report(report, curves).encode()
    replace_file(Path(file), content)
    return len(content)


def html_environment() -> "Environment":
    """Return the templates of pages, with what they need to show tables; text of a run stays text."""
    pages = _environment(autoescape=True)
    pages.filters |= {"css_class": css_class, "commands": _split_commands, "number_columns": _number_columns}
    return pages


def _environment(*, autoescape: bool) -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("reports.pages"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tables = {name: getattr(display_tables, name) for name in dir(display_tables) if name.endswith("_table")}
    pages.filters |= tables | {
        "machines_table": machines_table,
        "quarantines_table": quarantines_table,
        "count": format_count,
        "duration": format_duration,
        "line": one_line,
        "listing": format_list,
        "plain": format_cell,
        "sanitize": sanitize,
        "time": format_time,
    }
    return pages


def _render(pages: "Environment", name: str, report: RunReport, **context: object) -> str:
    title = f"Run {report.run_id} · {report.model_family}"
    stretches = group_receipts(report.attempts)
    return pages.get_template(name).render(report=report, title=title, stretches=stretches, **context)


def _split_commands(text: str) -> list[str]:
    """Return the text between backquotes at the odd places; text with an unpaired backquote stays whole."""
    line = one_line(text)
    parts = line.split("`")
    return parts if len(parts) % 2 else [line]


def _number_columns(table: Table) -> Sequence[bool]:
    """Return for each column whether all its cells are numbers or nothing."""
    columns = zip(*table.rows, strict=True) if table.rows else [()] * len(table.columns)
    return [bool(cells) and all(map(_is_number, cells)) for cells in columns]


def _is_number(value: object) -> bool:
    text = format_value(value)
    return value is None or text.replace(",", "").replace(".", "", 1).isdigit()
