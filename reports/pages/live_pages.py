"""The pages of `cairn ui` as HTML. Parts that may change while they are looked at are marked for its script."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from reports.explain.post_mortem import PostMortem
from reports.explain.post_mortem_text import post_mortem_answer, post_mortem_sections
from reports.pages.attempt_bars import place_bars
from reports.pages.followed_run import RunView
from reports.pages.report_pages import html_environment
from reports.queries.alias_history import AliasDecision, AliasPromotion
from reports.queries.receipts import group_receipts
from reports.queries.run_comparison import compare_runs
from reports.queries.run_overview import OverviewRow

if TYPE_CHECKING:
    from jinja2 import Environment

_SHEETS = ("report.css", "live.css")
_HEADINGS: Mapping[str, str] = {
    "run_id": "run",
    "state": "state",
    "step": "step",
    "train_loss": "train loss",
    "val_loss": "held-out loss",
    "gpu_seconds": "device time",
    "attempts": "attempts",
    "last_seen_at": "last sign of life",
}


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


def runs_page(frame: Frame, rows: Sequence[OverviewRow], query: RunsQuery, *, of: int, hourly: float | None) -> str:
    """Return the list of runs; `of` is how many the store has, `hourly` the price of a device hour."""
    return _render("live_runs.html.j2", frame, rows=rows, query=query, of=of, hourly=hourly, headings=_HEADINGS)


def run_page(frame: Frame, view: RunView) -> str:
    """Return one run: the sections of its report, the plot drawn by the browser."""
    report = view.report
    stretches = group_receipts(report.attempts)
    bars = place_bars(report.attempts)
    return _render("live_run.html.j2", frame, report=report, stretches=stretches, bars=bars, view=view)


def attempt_page(frame: Frame, facts: PostMortem) -> str:
    """Return the post-mortem of one attempt."""
    answer, sections = post_mortem_answer(facts), list(post_mortem_sections(facts))
    return _render("live_attempt.html.j2", frame, facts=facts, answer=answer, sections=sections)


def compare_page(frame: Frame, views: Sequence[RunView], missing: Sequence[str]) -> str:
    """Return runs over each other; `missing` says which of the wanted ones are not shown, and why."""
    comparison = compare_runs([view.log for view in views])
    return _render("live_compare.html.j2", frame, comparison=comparison, missing=missing)


def models_page(frame: Frame, promotions: Sequence[AliasPromotion], decisions: Sequence[AliasDecision]) -> str:
    """Return what every alias points at, and every decision about it."""
    return _render("live_models.html.j2", frame, promotions=promotions, decisions=decisions)


def problem_page(frame: Frame) -> str:
    """Return a page that only says what the problem is."""
    return _render("live_problem.html.j2", frame)


@cache
def style_sheet() -> bytes:
    """Return the style of all pages."""
    folder = files("reports.pages") / "templates"
    return b"".join((folder / name).read_bytes() for name in _SHEETS)


@cache
def _templates() -> "Environment":
    return html_environment()


def _render(name: str, frame: Frame, **context: object) -> str:
    return _templates().get_template(name).render(frame=frame, live=True, **context)
