"""The losses that a curve is seen against, and one palette: the pages have the colours in which plots draw reasons."""

import math
import re
from dataclasses import replace
from importlib.resources import files

import pytest
from matplotlib.figure import Figure

from cairn.reports.plots.curve_plot import draw_loss
from cairn.reports.plots.plot_axis import PlotAxis, reason_style, view_curves
from cairn.reports.plots.run_curves import LossMark, gather_curves
from cairn.storage.logs.step_log import StepPoint
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.policy.termination import TerminationReason
from tests.entries import step_record
from tests.fabricated_run import FabricatedRun, fabricate, promote

CHANCE = LossMark(label="chance, ln(257)", loss=math.log(257), is_target=False)
TARGET = LossMark(label="to beat: champion, bard@20", loss=2.0, is_target=True)


@pytest.fixture
def later(bard: FabricatedRun, store: LocalStore) -> FabricatedRun:
    """A run on the same data as the champion's, whose snapshot has 257 ids."""
    store.write(f"data/{'d' * 64}/snapshot.json", b'{"vocab_size": 257}')
    run = fabricate(store, "later")
    run.start()
    return run


def test_a_run_is_seen_against_a_uniform_guess_and_another_runs_champion(later: FabricatedRun) -> None:
    assert gather_curves(later.log).marks == (CHANCE, TARGET)


@pytest.mark.usefixtures("later")
def test_the_champions_own_run_has_nothing_to_beat(bard: FabricatedRun) -> None:
    assert gather_curves(bard.log).marks == (CHANCE,)


def test_without_its_snapshot_a_vocabulary_is_unknown_and_nothing_is_drawn(bard: FabricatedRun) -> None:
    assert gather_curves(bard.log).marks == ()


def test_a_champion_is_no_target_of_a_run_that_is_offered_to_another_alias_or_measured_under_another_suite(
    later: FabricatedRun, store: LocalStore
) -> None:
    run = fabricate(store, "elsewhere")
    run.start(overrides=("promotion.alias=other",))
    later.evaluate(later.commit(10), loss=3.0, suite_sha256="6" * 64)
    assert gather_curves(run.log).marks == gather_curves(later.log).marks == (CHANCE,)


def test_the_champion_of_an_alias_is_found_again_when_it_changes(later: FabricatedRun, store: LocalStore) -> None:
    third = fabricate(store, "third")
    third.start()
    promote(store, "third", third.commit(30), loss=1.5, alias="champion")
    assert gather_curves(later.log).marks[1:] == (
        LossMark(label="to beat: champion, third@30", loss=1.5, is_target=True),
    )


def drawn(later: FabricatedRun, losses: list[float]) -> list[str]:
    points = tuple(
        StepPoint(record=step_record(step, 1, train_loss=loss), replays=0) for step, loss in enumerate(losses, start=1)
    )
    panel = Figure().subplots()
    draw_loss(panel, PlotAxis(curves=replace(gather_curves(later.log), points=points), across="step"))
    legend = panel.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_both_are_drawn_and_named_where_a_curve_begins_at_a_guess(later: FabricatedRun) -> None:
    assert {CHANCE.label, TARGET.label} <= {*drawn(later, [5.6, 5.0, 4.0])}


def test_a_guess_far_above_the_curve_is_left_out_and_the_target_is_not(later: FabricatedRun) -> None:
    names = drawn(later, [3.0, 2.9, 2.8])
    assert CHANCE.label not in names and TARGET.label in names


def test_a_browser_gets_both(later: FabricatedRun) -> None:
    assert view_curves(gather_curves(later.log))["marks"] == (CHANCE, TARGET)


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
