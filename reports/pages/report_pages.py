"""Pages made of Jinja2 templates: a run's report as Markdown and HTML, and the live pages.

Parts of a live page that may change while it is seen are marked for its script.
"""

import base64
import re
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.reports.pages.run_report import RunReport, gather_report
from cairn.reports.plots import run_curves
from cairn.reports.queries import receipts, run_lookup, run_query, run_status
from cairn.reports.text import answer_text, display_tables, post_mortem_text
from cairn.storage.logs import run_log, step_log
from cairn.storage.stores import codec
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.policy.termination import TerminationReason
from cairn.tasks.text import format, output

if TYPE_CHECKING:
    from jinja2 import Environment

_WIDTH_PX, _HEIGHT_PX = 1200, 820
_BARS_WIDTH, _LEAST_BAR_WIDTH, _MOST_BARS = 1000, 1.5, 600
_MOST_SAMPLES = 20  # steps
_NUMBER = re.compile(r"[0-9,]+(\.[0-9]*)?|–")
_KNOWN: frozenset[str] = frozenset({*TerminationReason, receipts.OPEN})


def markdown_report(report: RunReport, *, columns: int | None = None) -> str:
    """Return the report as Markdown: text of the run stays text. In a terminal, lines and tables fit its columns."""
    pages = _environment(autoescape=False)
    if columns:
        pages.filters["markdown_table"] = partial(_lay_out_table, columns=columns)
    parts = pages.get_template("report.md.j2").render(report=report).split("```")
    if columns:  # every second part is between fences
        for place, part in list(enumerate(parts))[::2]:
            parts[place] = "\n".join(piece for line in part.split("\n") for piece in output.wrap(line, columns))
    return "```".join(parts)


def _lay_out_table(table: display_tables.Table, columns: int) -> str:
    rows = [[display_tables.format_cell(value) for value in row] for row in table.rows]
    return "\n".join(line for lines in output.lay_out(table.columns, rows, columns) for line in lines)


def html_report(report: RunReport, curves: run_curves.RunCurves) -> str:
    """Return the report as one HTML page with the plot inside; equal reports give equal bytes."""
    image = b""
    if report.curve:
        from cairn.reports.plots.curve_plot import draw_run  # numpy and matplotlib: only where a curve is drawn

        image = draw_run(curves, width_px=_WIDTH_PX, height_px=_HEIGHT_PX)
    plot = base64.b64encode(image).decode()
    return html_environment().get_template("report.html.j2").render(report=report, plot=plot, live=False)


@cache
def html_environment() -> "Environment":
    """Return the templates of pages, with what they need to show tables; text of a run stays text."""

    def commands(text: str) -> list[str]:
        """Return the text between backquotes at the odd places; text with an unpaired backquote stays whole."""
        parts = format.one_line(text).split("`")
        return parts if len(parts) % 2 else [format.one_line(text)]

    def number_columns(table: display_tables.Table) -> set[str]:
        """Return the headings of the columns in which all cells are numbers or nothing."""
        columns = zip(table.columns, zip(*table.rows, strict=True), strict=False)
        return {name for name, cells in columns if all(_NUMBER.fullmatch(format.format_value(cell)) for cell in cells)}

    shown: dict[str, Callable[..., object]] = {"commands": commands, "number_columns": number_columns}
    shown |= {"css_class": css_class, "place_bars": place_bars, "samples_by_step": samples_by_step}
    return _environment(autoescape=True, **shown)


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
    ours = {**vars(codec), **vars(format), **vars(display_tables), **vars(answer_text), **vars(post_mortem_text)}
    pages.filters |= {name: value for name, value in ours.items() if callable(value)} | filters
    return pages


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar: its place and width in units of the drawing, the reason it is coloured by, and its title."""

    left: float
    width: float
    reason: str
    title: str


def place_bars(attempts: Sequence[receipts.Receipt]) -> tuple[Sequence[Bar], datetime, datetime]:
    """Return one bar an attempt, above 600 attempts one for each span of equal ends, and the ends of the drawing.

    The drawing is 1,000 units wide; of a run without attempts there is none.
    """
    together = [attempts] if len(attempts) > _MOST_BARS else [[receipt] for receipt in attempts]
    stretches = [stretch for group in together for stretch in receipts.group_receipts(group)]
    # An open attempt ends where it is known to have trained.
    trained = (timedelta(seconds=item.last.gpu_seconds / item.last.placement.devices) for item in stretches)
    ends = [item.last.ended_at or item.last.started_at + one for item, one in zip(stretches, trained, strict=True)]
    begin, end, bars = attempts[0].started_at, max(ends), list[Bar]()
    scale = _BARS_WIDTH / ((end - begin).total_seconds() or 1.0)
    for item, last in zip(stretches, ends, strict=True):
        first, seconds = item.first, (last - item.first.started_at).total_seconds()
        width = max(seconds * scale, _LEAST_BAR_WIDTH)
        left = min((first.started_at - begin).total_seconds() * scale, _BARS_WIDTH - width)
        which = f"attempts {first.attempt} to {item.last.attempt}" if item.is_many else f"attempt {first.attempt}"
        steps = f"steps {first.first_step:,} to {item.last.last_step:,}"
        title = f"{which}: {item.reason}, {steps}, {format.format_duration(seconds)}"
        bars.append(Bar(left=left, width=width, reason=item.reason, title=title))
    return bars, begin, end


def css_class(reason: str) -> str:
    """Return the CSS class that colours a reason, also of `preempted × 214`; `r-other` where it is unknown."""
    name = reason.split(" × ")[0].removesuffix(receipts.INJECTED)
    return f"r-{name}" if name in _KNOWN else "r-other"


LAST_SEEN = "last_seen_at"
OverviewRow = namedtuple(
    "OverviewRow",
    "run_id state model_family step total_steps attempts train_loss val_loss gpu_seconds wasted_gpu_seconds "
    "last_seen_at opened_at forked_from_run detail tags tokens_per_second seconds_left",
)
"""One run: losses in nats per token, `train_loss` of its last step and `val_loss` of its newest evaluation."""


def read_overview(store: ObjectStore, *, work: Path) -> tuple[OverviewRow, ...]:
    """Return every run that is not deleted, as SQL has it; `work` is this machine's folder."""
    sql = f"select {', '.join(OverviewRow._fields)} from runs where state <> '{run_status.RunPhase.DELETED}'"
    with run_query.answer_query(store, sql, work=work) as found:
        return tuple(OverviewRow(*row) for row in found.rows)


def select_rows(rows: Sequence[OverviewRow], *, search: str, sort: str, descending: bool) -> tuple[OverviewRow, ...]:
    """Return the runs in whose id, state, family, tags or detail every word of `search` occurs, unknowns last."""
    found = []
    for row in sorted(rows, key=lambda row: row.run_id):
        searched = (row.run_id, row.state, row.model_family, *(row.tags or ()), row.detail)
        text = " ".join(filter(None, searched)).casefold()
        if all(word in text for word in search.casefold().split()):
            found.append(row)
    known = [row for row in found if getattr(row, sort) is not None]
    unknown = [row for row in found if getattr(row, sort) is None]
    return (*sorted(known, key=lambda row: getattr(row, sort), reverse=descending), *unknown)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run as it was found: its report, the curves of its plot, and its log."""

    report: RunReport
    curves: run_curves.RunCurves
    log: run_log.RunLog


def samples_by_step(view: RunView) -> Mapping[int, Sequence[str]]:
    """Return the texts that the run wrote at its newest steps, in probes or evaluations, the newest first."""
    texts: dict[int, Sequence[str]] = {item.step: item.samples for item in view.report.evaluations if item.samples}
    probes = ((point.record.step, point.record.sample) for point in view.curves.points)
    texts = {step: (sample,) for step, sample in probes if sample} | texts
    return {step: texts[step] for step in sorted(texts, reverse=True)[:_MOST_SAMPLES]}


class FollowedRun:
    """One run of a store, read by one thread at a time. Nothing is read before `read`."""

    def __init__(self, store: ObjectStore, run_id: str, environment: Mapping[str, str]) -> None:
        """Raise `RunNotFound`; prices come from the environment where it names them."""
        self._log = run_lookup.find_run(store, run_id)
        self._environment = environment
        self._tail = step_log.StepTail(store, self._log.prefix)
        self._lines: list[step_log.StepRecord] | None = None
        self._view: RunView | None = None

    def read(self) -> RunView:
        """Return the run as it is now; of one without an open attempt nothing but its log is asked again."""
        state, known = self._log.refresh(), self._view
        if known is not None and state.open_attempt is None and known.report.newest_seq == self._log.seq:
            return known
        growing = [record.started for record in state.attempts[-2:]]  # these are read on from where it was
        if self._lines is None:
            before = state.attempts[:-2]
            self._lines = step_log.read_step_records(self._log.store, self._log.prefix, before) if before else []
        for started in growing:
            while fresh := self._tail.read(started.attempt, started.claim_id):
                self._lines += fresh
        report, curves = gather_report(self._log, self._environment, lines=self._lines)
        self._view = RunView(report=report, curves=curves, log=self._log)
        return self._view


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The frame of every page: the store's URL, and why it cannot be read now; empty where it can."""

    store: str
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsQuery:
    """The words and the field that the list of runs is searched and sorted by, and its page, from 1."""

    search: str
    sort: str
    descending: bool
    page: int = 1


def render_page(name: str, frame: Frame, **shown: object) -> str:
    """Return a page of a template's name with what it shows, and its frame around it."""
    return html_environment().get_template(f"live_{name}.html.j2").render(frame=frame, live=True, **shown)
