"""A report made into a page: Markdown for the terminal, HTML for a file, which is there whole or not at all.

Owns which picture goes in. Refuses to know what is reported and how pages look.
"""

import math
from pathlib import Path

from reports.pages.markdown import markdown_page
from reports.pages.report_html import html_page
from reports.pages.report_sections import report_sections
from reports.pages.run_report import RunReport
from reports.plots.run_curves import RunCurves
from reports.plots.run_plot import write_whole

_WIDTH_PX, _HEIGHT_PX = 1200, 820


def markdown_report(report: RunReport) -> str:
    """Return the report as Markdown."""
    losses = [point.train_loss for point in report.curve if math.isfinite(point.train_loss)]
    return markdown_page(_title(report), report_sections(report), losses)


def html_report(report: RunReport, curves: RunCurves) -> str:
    """Return the report as one HTML page with the picture of the run inside."""
    picture = b""
    if report.curve:
        from reports.plots.curve_plot import draw_png  # numpy and matplotlib: not before there is something to draw

        picture = draw_png(curves, width_px=_WIDTH_PX, height_px=_HEIGHT_PX)
    return html_page(_title(report), report_sections(report), attempts=report.attempts, picture=picture)


def write_html_report(report: RunReport, curves: RunCurves, file: str) -> int:
    """Write the page and return its bytes; raises `InvalidConfiguration` where the file cannot be written."""
    content = html_report(report, curves).encode()
    write_whole(Path(file), content)
    return len(content)


def _title(report: RunReport) -> str:
    return f"Run {report.run_id} · {report.model_family}"
