"""What is gathered of a run for its plot, and that a plot comes of whatever was gathered."""

import base64
import functools
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cairn.flows.orchestrator.run_overview import curve_markdown, drawing_pause
from cairn.reports.plots.curve_plot import draw_loss, draw_run
from cairn.reports.plots.plot_axis import COLUMNS, PlotAxis, Series, reason_style, smooth, thin_out
from cairn.reports.plots.run_curves import (
    PromotedPoint,
    Replay,
    RunCurves,
    describe_run,
    describe_state,
    format_number,
    format_title,
    gather_curves,
)
from cairn.reports.queries.evaluations import HeldOutPoint
from cairn.storage.logs.log_entry import ForkOrigin
from cairn.storage.logs.run_entries import RunFinished
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.step_log import StepPoint, StepRecord
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.policy.termination import TerminationReason
from tests import entries
from tests.fabricated_run import FabricatedRun, write_steps


def line(step: int, *, attempt: int = 1, loss: float = 3.0, **values: Any) -> StepRecord:
    return entries.step_record(step, attempt, train_loss=loss, **values)


def curves(lines: Sequence[StepRecord] = (), **values: Any) -> RunCurves:
    usual: dict[str, Any] = {
        "run_id": "bard",
        "model_family": "gpt2-tiny",
        "state": "running",
        "verdict": "",
        "snapshot_id": "ab" * 32,
        "total_steps": 100,
        "tokens_per_step": 16,
        "attempts": 1,
        "gpu_seconds": 60.0,
        "points": tuple(StepPoint(record=item, replays=0) for item in lines),
        "interruptions": {},
        "replays": (),
        "held_out": (),
        "promotions": (),
        "end": None,
    }
    return RunCurves(**{**usual, **values})


def finished(step: int, stopped: str = "") -> RunFinished:
    return RunFinished(attempt=1, step=step, manifest_sha256="m", state_sha256="s", stopped=stopped)


def eventful() -> RunCurves:
    held_out = tuple(
        HeldOutPoint(step=step, tokens=0, val_loss=6 - step / 100, manifest_sha256=str(step)) for step in (50, 100)
    )
    return curves(
        [line(step, loss=6 - step / 90, probe_loss=6.0 if step % 10 == 0 else None) for step in range(1, 101)],
        state="finished",
        verdict="healthy",
        interruptions={"lost": [60], "preempted": [80]},
        replays=(Replay(first_step=51, last_step=60),),
        held_out=held_out,
        promotions=(PromotedPoint(step=100, alias="champion", current=True, val_loss=5.0),),
        end=finished(100),
    )


@functools.cache
def eventful_png() -> bytes:
    return draw_run(eventful())


@functools.cache
def eventful_svg() -> bytes:
    return draw_run(eventful(), form="svg")


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_the_line_goes_on_from_the_commit_and_the_repeated_steps_are_named(
    bard: FabricatedRun,
) -> None:
    write_steps(bard.log, 1, range(1, 28))
    write_steps(bard.log, 2, range(21, 34))
    found = gather_curves(bard.log)
    assert [point.record.step for point in found.points] == list(range(1, 34))
    assert found.replays == (Replay(first_step=21, last_step=27),)
    assert (found.last_step, found.total_steps, found.attempts, found.state) == (33, 40, 2, "running")


def test_an_attempt_is_marked_where_its_records_end_with_why_it_ended(bard: FabricatedRun) -> None:
    write_steps(bard.log, 1, range(1, 28))
    assert gather_curves(bard.log).interruptions == {"preempted": [27]}


def test_the_line_of_a_fork_begins_with_its_ancestors_up_to_where_it_branches_and_names_every_one(
    bard: FabricatedRun, store: LocalStore
) -> None:
    write_steps(bard.log, 1, range(1, 28))
    reference, ancestors = bard.log.state.checkpoints[0].committed.reference, ("bard", "twin", "third", "fourth")
    for number, further in enumerate((0, 3, 5), start=1):
        parent, name = ancestors[number - 1 : number + 1]
        checkpoint = replace(reference, step=reference.step + further)
        body = entries.opened(name, forked_from=ForkOrigin(run_id=parent, checkpoint=checkpoint, state_sha256="s"))
        child = RunLog(store, name)
        child.append(lambda _, body=body: body, writer=entries.writer())  # type: ignore[misc]
        found = gather_curves(child)
        assert found.ancestors == ancestors[:number]
        assert [point.record.step for point in found.inherited] == list(range(1, 11))


def test_the_ancestors_line_is_drawn_whole_and_named() -> None:
    from matplotlib.figure import Figure

    points = tuple(StepPoint(record=line(step, loss=9.0), replays=0) for step in range(1, 21))
    forked = curves([line(step) for step in range(21, 40)], ancestors=("bard", "twin"), inherited=points)
    panel = Figure().subplots()
    draw_loss(panel, PlotAxis(curves=forked, across="step"))
    legend = panel.get_legend()
    assert legend is not None and "bard → twin, before" in [text.get_text() for text in legend.get_texts()]
    assert panel.get_ylim()[1] > 9.0


def test_the_champion_and_what_was_promoted_before_it_are_marked(bard: FabricatedRun) -> None:
    assert gather_curves(bard.log).promotions == (
        PromotedPoint(step=10, alias="champion", current=False, val_loss=3.0),
        PromotedPoint(step=20, alias="champion", current=True, val_loss=2.0),
    )


def test_the_best_is_the_least_held_out_loss(bard: FabricatedRun) -> None:
    found = gather_curves(bard.log)
    assert [(point.step, point.val_loss) for point in found.held_out] == [(10, 3.0), (20, 2.0)]
    assert found.best is not None and found.best.step == 20


def test_losses_measured_by_another_suite_are_not_drawn_into_the_line(fresh: FabricatedRun) -> None:
    fresh.start()
    first, second = fresh.commit(10), fresh.commit(20)
    fresh.evaluate(first, loss=3.0)
    fresh.evaluate(second, loss=2.0)
    fresh.evaluate(second, loss=0.1, suite_sha256="6" * 64)
    assert [point.val_loss for point in gather_curves(fresh.log).held_out] == [3.0, 2.0]


def test_a_loss_measured_again_replaces_the_one_before(fresh: FabricatedRun) -> None:
    fresh.start()
    first = fresh.commit(10)
    fresh.evaluate(first, loss=3.0)
    fresh.evaluate(first, loss=2.5)
    assert [point.val_loss for point in gather_curves(fresh.log).held_out] == [2.5]


def test_a_run_that_was_only_opened_has_a_record_and_a_plot(fresh: FabricatedRun) -> None:
    found = gather_curves(fresh.log)
    assert (found.last_step, found.best, found.tokens_per_step) == (0, None, 16)
    assert size_of(draw_run(found, width_px=901, height_px=601)) == (901, 601)


def test_equal_curves_give_equal_bytes() -> None:
    assert draw_run(eventful()) == eventful_png()
    assert draw_run(eventful(), form="svg") == eventful_svg()


def test_plots_hold_no_date() -> None:
    assert b"<dc:date>" not in eventful_svg()
    assert b"tIME" not in eventful_png() and b"tEXt" not in eventful_png()


def test_tokens_may_run_along_the_bottom() -> None:
    assert draw_run(eventful(), across="tokens") != eventful_png()


NOT_FINITE = [math.nan, math.inf, -math.inf]
HELD_OUT = HeldOutPoint(step=3, tokens=0, val_loss=2.0, manifest_sha256="m")
PROMOTED_WITHOUT_LOSS = PromotedPoint(step=1, alias="a", current=True, val_loss=None)
EVERY_REASON = {reason: [number] for number, reason in enumerate([*TerminationReason, "unheard-of"], start=1)}
ODD = {
    "one step, promoted without a loss, strange names": curves(
        [line(1)], promotions=(PROMOTED_WITHOUT_LOSS,), run_id="$x^{y" + "z" * 90, model_family="$$", state="stopped"
    ),
    "two steps, the length of one unknown": curves([line(1), line(2)], tokens_per_step=0),
    "nothing finite": curves(
        [line(s, loss=math.nan, lr=math.nan, grad_norm=math.inf, tokens_per_second=math.nan) for s in range(1, 20)],
        held_out=(replace(HELD_OUT, val_loss=math.nan),),
    ),
    "exploding, some not finite": curves(
        [line(s, loss=NOT_FINITE[s % 3] if s < 10 else 10.0**s) for s in range(1, 300)]
    ),
    "all zero, stopped early, every reason": curves(
        [line(s, loss=0.0, lr=0.0, grad_norm=0.0, tokens_per_second=0.0) for s in range(1, 60)],
        end=finished(40, "overfitting"),
        interruptions=EVERY_REASON,
    ),
    "negative": curves([line(s, loss=-1.0 * s) for s in range(1, 20)]),
    "evaluated but not recorded": curves(held_out=(HELD_OUT,)),
}


@pytest.mark.parametrize("name", ODD)
def test_whatever_happened_there_is_a_plot(name: str) -> None:
    assert size_of(draw_run(ODD[name], across="tokens")) == (1200, 900)


@functools.cache
def long_run() -> tuple[RunCurves, bytes]:
    """A run of twenty thousand steps with nearly a thousand preemptions and one other end, and its plot."""
    steps, generator = 20_000, np.random.default_rng(0)
    noise = generator.normal(0, 0.1, steps)
    ends = range(20, 20_000, 20)
    replays = tuple(Replay(first_step=end - 8, last_step=end) for end in ends)
    lines = [line(step + 1, loss=3 + noise[step]) for step in range(steps)]
    found = curves(lines, interruptions={"preempted": ends, "oom": [10_010]}, replays=replays)
    return found, draw_run(found)


def test_twenty_thousand_steps_and_a_thousand_attempts_are_a_small_plot() -> None:
    found, png = long_run()
    assert found.reasons == (("preempted", 999), ("oom", 1))
    assert len(png) < 150_000


def test_a_rare_reason_is_seen_among_a_thousand_preemptions() -> None:
    purple = bytes.fromhex(reason_style("oom")[0][1:])
    assert pixels_of(long_run()[1], purple) > 500 > 50 > pixels_of(eventful_png(), purple)


def test_white_stays_white_where_the_colors_of_a_picture_are_reduced() -> None:
    assert pixels_of(eventful_png(), b"\xff\xff\xff") > 500_000


def pixels_of(png: bytes, color: bytes) -> int:
    from io import BytesIO

    from PIL import Image

    pixels = np.asarray(Image.open(BytesIO(png)).convert("RGB"))
    return int((np.abs(pixels.astype(int) - np.frombuffer(color, np.uint8)).sum(axis=-1) < 12).sum())


def test_every_reason_looks_different() -> None:
    looks = [reason_style(reason) for reason in TerminationReason if reason != "completed"]
    assert len(set(looks)) == len(looks) == len({letter for _, _, letter in looks}), "the letters alone tell them apart"


@pytest.mark.parametrize(("total_steps", "reach"), [(500, 500), (40, 100), (0, 100)])
def test_the_axis_goes_to_the_planned_last_step_or_to_where_the_records_end(total_steps: int, reach: int) -> None:
    drawn = replace(curves([line(step) for step in range(1, 101)]), total_steps=total_steps)
    assert PlotAxis(curves=drawn, across="step").reach == reach


def test_thinning_keeps_every_spike_both_ends_and_the_order() -> None:
    steps = np.arange(1.0, 1_000_001.0)
    values = np.full(len(steps), 3.0)
    values[[123_456, 777_777]] = 90.0, -5.0
    kept = thin_out(Series(steps=steps, values=values), columns=500)
    assert len(kept.steps) <= 4 * 500
    assert {90.0, -5.0} <= set(kept.values) and (np.diff(kept.steps) > 0).all()
    assert (kept.steps[0], kept.steps[-1]) == (1.0, 1_000_000.0)


def test_the_trend_follows_the_line_at_most_two_windows_behind_it_and_ignores_one_spike() -> None:
    steps = np.arange(1.0, 501.0)
    values = 3 + 7 * np.exp(-steps / 40)
    spiked = values.copy()
    spiked[250] = 1000.0
    trend, behind = smooth(Series(steps=steps, values=spiked), planned=500).values, 2 * 500 // 100
    assert trend[0] == values[0] and (trend >= values - 1e-12).all()
    assert (trend[behind:] <= values[:-behind]).all()


@pytest.mark.parametrize("planned", [60, 500, 5_000])
@pytest.mark.parametrize("seen", [1, 59, 60, 400])
def test_a_curve_that_grows_does_not_change_the_past_of_its_trend(planned: int, seen: int) -> None:
    values = np.random.default_rng(seed=1).normal(size=3_000)
    whole = smooth(Series(steps=np.arange(1.0, 3_001.0), values=values), planned=planned).values
    width = max(1, -(-planned // COLUMNS))
    earlier = smooth(Series(steps=np.arange(1.0, seen * width + 1), values=values[: seen * width]), planned=planned)
    assert (earlier.values == whole[: len(earlier.values)]).all()


def test_a_fork_has_its_parents_trend_up_to_where_it_branches_and_the_same_window_after_it() -> None:
    points = [line(step, loss=3.0 + (step * 7919 % 13) / 10) for step in range(1, 101)]
    alone, fork = curves(points), replace(curves(points[60:]), inherited=curves(points[:60]).points)
    before, after = PlotAxis(curves=fork, across="step").trends("train_loss")
    (_, whole) = PlotAxis(curves=alone, across="step").trends("train_loss")
    assert [*before.values, *after.values] == [*whole.values]


@pytest.mark.parametrize(
    "planned", [5, 0, -5, 2**64], ids=["five steps", "none", "fewer than none", "no number of steps"]
)
def test_what_is_not_finite_is_no_part_of_the_trend_whatever_is_planned(planned: int) -> None:
    values = np.array([1.0, math.nan, 1.0, math.inf, 1.0])
    assert (smooth(Series(steps=np.arange(5.0), values=values), planned=planned).values == 1.0).all()


def test_ends_of_one_reason_share_a_pixel_column() -> None:
    found = curves(interruptions={"lost": range(1, 50_001)})
    assert len(PlotAxis(curves=found, across="step").places("lost")) <= 1201


def test_the_words_say_what_it_is_a_plot_of() -> None:
    drawn = eventful()
    assert (format_title(drawn), describe_state(drawn)) == ("bard  ·  gpt2-tiny", "finished  ·  healthy")
    assert describe_run(drawn).split("   ·   ") == [
        "step 100 of 100",
        "1.6k tokens",
        "1.0 device minutes",
        "1 attempt",
        "data snapshot abababababab",
    ]


def test_numbers_on_axes_are_short() -> None:
    assert [format_number(value) for value in (0, 500, 2_500, 1e6, 3e11)] == ["0", "500", "2.5k", "1M", "300B"]


def test_the_artifact_holds_the_plot_itself(bard: FabricatedRun) -> None:
    write_steps(bard.log, 1, range(1, 28))
    markdown = curve_markdown(bard.log)
    assert len(markdown) < 200_000
    plot = re.search(r"!\[curves of bard\]\(data:image/png;base64,([^)]+)\)", markdown)
    assert plot is not None and size_of(base64.b64decode(plot[1])) == (900, 600)


def test_there_is_no_artifact_before_there_is_a_step(fresh: FabricatedRun) -> None:
    assert curve_markdown(fresh.log) == ""


@pytest.mark.parametrize(
    ("seconds", "age_seconds", "has_news", "pause"),
    [(1.0, 100.0, False, 60.0), (1.0, 86_400.0, False, 86_400.0 / 20), (10.0, 86_400.0, True, 200.0)],
    ids=["a minute", "then ever longer", "sooner where an attempt ended, and never at any cost"],
)
def test_a_plot_stands_for(seconds: float, age_seconds: float, has_news: bool, pause: float) -> None:
    assert drawing_pause(seconds, age_seconds=age_seconds, has_news=has_news) == pause
