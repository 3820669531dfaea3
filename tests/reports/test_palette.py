"""One palette: the report's and the page's style sheet has the colours in which plots draw termination reasons."""

import re
from importlib.resources import files

import pytest

from cairn.reports.plots.plot_axis import reason_style
from cairn.tasks.policy.termination import TerminationReason

STYLE, LIVE = (
    (files("cairn.reports.pages") / "templates" / name).read_text(encoding="utf-8")
    for name in ("report.css", "live.css")
)
COLORS = dict(re.findall(r"--([a-z]+):(#[0-9a-f]{6})", STYLE.lower()))
TONES = {
    reason: tone
    for names, tone in re.findall(r"((?:\.r-[a-z-]+,?)+)\{fill:var\(--([a-z]+)\)", STYLE)
    for reason in re.findall(r"\.r-([a-z-]+)", names)
}


@pytest.mark.parametrize("reason", ["preempted", "lost", "oom", "hung", "bad-data", "storage", "too-few-machines"])
def test_a_reason_has_the_colour_of_the_plots(reason: str) -> None:
    assert COLORS[TONES[reason]] == reason_style(reason)[0].lower()


def test_the_live_page_draws_no_reason_in_another_colour_than_the_report() -> None:
    assert {*re.findall(r"--([a-z]+):#", LIVE)} & COLORS.keys() == set()


def test_every_reason_has_a_colour_on_the_page() -> None:
    assert {str(reason) for reason in TerminationReason} - TONES.keys() == set()
