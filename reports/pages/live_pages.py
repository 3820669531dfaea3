"""What `cairn ui` reads, and its pages as HTML. Parts that may change while they are seen are marked for its script."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from threading import Lock
from urllib.parse import urlencode

from cairn.reports.pages import report_pages, run_report
from cairn.reports.plots.run_curves import RunCurves
from cairn.reports.queries import post_mortem, receipts, run_lookup, run_query, run_status
from cairn.reports.text import post_mortem_text
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.step_log import StepRecord, StepTail, read_step_records
from cairn.storage.stores.object_store import ObjectStore

_templates = cache(report_pages.html_environment)
HEADINGS: Mapping[str, str] = {
    "run_id": "run",
    "state": "state",
    "step": "step",
    "train_loss": "train loss",
    "val_loss": "held-out loss",
    "gpu_seconds": "device time",
    "attempts": "attempts",
    "last_seen_at": "last sign of life",
}
SORTS = ("last_seen_at", "run_id", "state", "step", "train_loss", "val_loss", "gpu_seconds", "attempts")
"""The fields that runs can be sorted by; the first one is the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverviewRow:
    """One run: losses in nats per token, `train_loss` while it trains and `val_loss` of its newest evaluation."""

    run_id: str
    state: str
    model_family: str | None
    step: int | None
    total_steps: int | None
    attempts: int | None
    train_loss: float | None
    val_loss: float | None
    gpu_seconds: float | None
    wasted_gpu_seconds: float | None
    last_seen_at: datetime | None
    opened_at: datetime | None
    forked_from_run: str | None
    detail: str | None

    @property
    def share(self) -> float:
        """How much of its steps the run has done, 0 to 1."""
        return min((self.step or 0) / self.total_steps, 1.0) if self.total_steps else 0.0


def read_overview(store: ObjectStore, *, work: Path) -> tuple[OverviewRow, ...]:
    """Return every run that is not deleted, as SQL has it; `work` is this machine's folder."""
    names = list(OverviewRow.__annotations__)
    sql = f"select {', '.join(names)} from runs where state <> '{run_status.RunPhase.DELETED}'"
    with run_query.answer_query(store, sql, work=work) as found:
        return tuple(OverviewRow(**dict(zip(names, row, strict=True))) for row in found.rows)


def select_rows(rows: Sequence[OverviewRow], *, search: str, sort: str, descending: bool) -> tuple[OverviewRow, ...]:
    """Return the runs in whose id, state, family or detail every word of `search` occurs, sorted; unknowns last."""
    found = []
    for row in sorted(rows, key=lambda row: row.run_id):
        text = " ".join(filter(None, (row.run_id, row.state, row.model_family, row.detail))).casefold()
        if all(word in text for word in search.casefold().split()):
            found.append(row)
    known = [row for row in found if getattr(row, sort) is not None]
    unknown = [row for row in found if getattr(row, sort) is None]
    return (*sorted(known, key=lambda row: getattr(row, sort), reverse=descending), *unknown)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run as it was found: its report, the curves of its plot, and its log."""

    report: run_report.RunReport
    curves: RunCurves
    log: RunLog


class FollowedRun:
    """One run of a store; thread-safe. Nothing is read before `look`."""

    def __init__(self, store: ObjectStore, run_id: str, environment: Mapping[str, str]) -> None:
        """Raise `RunNotFound`; prices come from the environment where it names them."""
        self._log = run_lookup.find_run(store, run_id)
        self._environment = environment
        self._tail = StepTail(store, self._log.prefix)
        self._lines: list[StepRecord] | None = None
        self._view: RunView | None = None
        self._lock = Lock()

    def look(self) -> RunView:
        """Return the run as it is now; of one without an open attempt nothing but its log is asked again."""
        with self._lock:
            state, known = self._log.refresh(), self._view
            if known is not None and state.open_attempt is None and known.report.newest_seq == self._log.seq:
                return known
            growing = [record.started.attempt for record in state.attempts[-2:]]  # these are read on from where it was
            if self._lines is None:
                before = read_step_records(self._log.store, self._log.prefix) if len(state.attempts) > 2 else []
                self._lines = [record for record in before if record.attempt not in growing]
            for attempt in growing:
                while fresh := self._tail.read(attempt):
                    self._lines += fresh
            report, curves = run_report.gather_report(self._log, self._environment, lines=self._lines)
            self._view = RunView(report=report, curves=curves, log=self._log)
            return self._view


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What surrounds every page: the store's URL, and why it cannot be read now; empty where it can."""

    store: str
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsQuery:
    """What the list of runs is searched for and sorted by."""

    search: str
    sort: str
    descending: bool

    def link(self, sort: str) -> str:
        """Return the address of the list sorted by another field; by the same one, the other way round."""
        down = not self.descending if sort == self.sort else sort not in ("run_id", "state")
        return f"/?{urlencode({'q': self.search, 'sort': sort, 'down': int(down)})}"


def attempt_page(frame: Frame, facts: post_mortem.PostMortem) -> str:
    """Return the post-mortem of one attempt."""
    answer, sections = post_mortem_text.post_mortem_answer(facts), list(post_mortem_text.post_mortem_sections(facts))
    return render_page("attempt", frame, facts=facts, answer=answer, sections=sections)


def run_page(frame: Frame, view: RunView) -> str:
    """Return one run: the sections of its report, the plot drawn by the browser."""
    report = view.report
    stretches, bars = receipts.group_receipts(report.attempts), report_pages.place_bars(report.attempts)
    return render_page("run", frame, report=report, stretches=stretches, bars=bars, view=view)


def render_page(name: str, frame: Frame, **shown: object) -> str:
    """Return a page of a template's name with what it shows, and its frame around it."""
    return _templates().get_template(f"live_{name}.html.j2").render(frame=frame, live=True, **shown)
