"""`cairn plot`, `compare` and `diagnose`: curves as files, beside each other, and what is said of them.

What cannot be drawn is refused in `command_lines`; what is imported is in `test_real_commands`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn.reports.plots import curve_plot
from cairn.reports.queries.evaluations import diagnose_run
from cairn.reports.queries.run_comparison import compare_runs, find_runs
from cairn.reports.queries.run_status import list_runs, read_status
from cairn.reports.text.display_tables import compared_runs_table
from cairn.storage.logs.run_entries import CurveVerdict
from cairn.storage.stores.local_store import LocalStore
from tests.commands import ROOT, Cairn
from tests.entries import finished, writer
from tests.fabricated_run import FabricatedRun, fabricate, write_steps


@pytest.fixture
def quickly_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every picture is a few bytes: for what is done with it."""
    monkeypatch.setattr(curve_plot, "draw_run", lambda *given, **named: b"a picture")


@pytest.mark.parametrize(("name", "begins"), [("curve.png", b"\x89PNG"), ("curve.SVG", b"<?xml")])
def test_the_suffix_says_the_format(
    bard: FabricatedRun, cairn: Cairn, tmp_path: Path, name: str, begins: bytes
) -> None:
    ended = cairn("plot", "bard", name)
    assert ended.code == 0, ended.err
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert name in ended.out


@pytest.mark.usefixtures("quickly_drawn")
def test_with_json_stdout_says_what_was_written(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    said = json.loads(cairn("plot", "bard", "curve.png", "--width", "600", "--height", "450", "--json").out)
    assert said["bytes"] == (tmp_path / "curve.png").stat().st_size
    assert (said["run_id"], said["width_px"], said["height_px"]) == ("bard", 600, 450)
    assert (said["attempts"], said["interruptions"], said["last_step"]) == (2, {"preempted": 1}, 20)


@pytest.mark.usefixtures("quickly_drawn")
def test_a_picture_is_replaced_and_nothing_else_is_left(bard: FabricatedRun, cairn: Cairn, tmp_path: Path) -> None:
    (tmp_path / "curve.png").write_text("older")
    assert cairn("plot", "bard", "curve.png").code == 0
    assert (tmp_path / "curve.png").read_text() == "a picture"
    assert sorted(path.name for path in tmp_path.glob("*curve*")) == ["curve.png"]


BEST_RATE = (
    "select lr, min(val_loss) as best from runs where starts_with(run_id, 'rates.') group by lr order by best limit 1"
)


def trained(store: LocalStore, run_id: str, rate: str, loss: float) -> FabricatedRun:
    """A run with this learning rate, which was evaluated at step 10."""
    overrides = [f"training.lr={rate}", "cost.gpu_hour_price=3.0"]
    run = fabricate(store, run_id, overrides=overrides)
    number = run.start(overrides=overrides)
    write_steps(run.log, number, range(1, 11), train_loss=lambda step: loss + 1 / step, lr=float(rate))
    run.evaluate(run.commit(10), loss=loss)
    run.end("preempted", action="resume", charged="preempted", gpu_seconds=3600.0)
    return run


@pytest.fixture
def rates(store: LocalStore) -> LocalStore:
    """A set of three learning rates, of which the middle one is best."""
    for rate, loss in (("1e-4", 4.0), ("1e-3", 2.0), ("1e-2", 3.0)):
        trained(store, f"rates.lr={rate}", rate, loss)
    return store


@pytest.fixture
def compared(rates: LocalStore, cairn: Cairn) -> list[dict[str, Any]]:
    """The runs of the set, as they are compared by its name."""
    found: list[dict[str, Any]] = json.loads(cairn("compare", "rates", "--json").out)["runs"]
    return found


def test_the_name_of_a_set_stands_for_its_runs(compared: list[dict[str, Any]]) -> None:
    assert [run["run_id"] for run in compared] == ["rates.lr=1e-2", "rates.lr=1e-3", "rates.lr=1e-4"]


def test_runs_of_equal_bits_say_with_which_and_until_which_step(compared: list[dict[str, Any]]) -> None:
    same = "identical to rates.lr=1e-2 until step 10"  # what these runs commit depends on the step alone
    assert [run["identical"] for run in compared] == ["", same, same]


def test_only_what_differs_of_the_configurations_is_shown(compared: list[dict[str, Any]]) -> None:
    assert [run["settings"] for run in compared] == [{"training.lr": lr} for lr in (0.01, 0.001, 0.0001)]


def test_each_run_has_its_losses_and_its_cost(compared: list[dict[str, Any]]) -> None:
    best = compared[1]
    assert (best["best"]["step"], best["best"]["tokens"], best["best"]["val_loss"]) == (10, 160, 2.0)
    assert (best["train_loss"], best["gpu_seconds"], best["money"], best["currency"]) == (2.1, 3600.0, 3.0, "USD")


def test_losses_stand_first_and_bits_speed_and_memory_beside_them(rates: LocalStore) -> None:
    columns = compared_runs_table(compare_runs(find_runs(rates, ["rates"]))).columns
    assert [*columns][:3] == ["run", "best held-out loss", "at step"]
    assert {"bits", "tokens/s", "memory"} <= {*columns}


@pytest.mark.usefixtures("rates")
def test_the_terminal_shows_the_best_run_first_money_and_held_out_losses_a_run_a_column(cairn: Cairn) -> None:
    out = cairn("compare", "rates").out
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["run", "best"] and "rates.lr=1e-3" in " ".join(lines[1:4]), lines
    assert "3.00 USD" in out and lines[-1].split() == ["10", "3", "2", "4"]


@pytest.mark.usefixtures("rates")
@pytest.mark.parametrize(
    ("across", "name", "begins"),
    [("step", "a.png", b"\x89PNG"), ("tokens", "a.svg", b"<?xml"), ("time", "b.png", b"\x89PNG")],
)
def test_the_losses_are_drawn_over_each_other(
    cairn: Cairn, tmp_path: Path, across: str, name: str, begins: bytes
) -> None:
    ended = cairn("compare", "rates", "--png", name, "--x", across)
    assert ended.code == 0, ended.err
    assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.usefixtures("rates")
def test_which_learning_rate_was_best_is_one_query_which_the_page_about_looking_at_runs_has(cairn: Cairn) -> None:
    assert json.loads(cairn("sql", BEST_RATE, "--json").out) == [{"lr": 0.001, "best": 2.0}]
    assert BEST_RATE in " ".join((ROOT / "docs/how-to/look-at-runs.md").read_text().split())


def test_two_runs_without_a_step_are_compared_and_drawn(cairn: Cairn, store: LocalStore) -> None:
    fabricate(store, "one")
    fabricate(store, "two")
    assert cairn("compare", "one", "two", "--png", "empty.png").code == 0


FALLING = {"train_loss": lambda step: 5.5 - step / 100, "tokens_per_second": 1.0, "seconds": 1.0}


def give_vocabulary(run: FabricatedRun, size: int) -> None:
    """Write as much of the run's snapshot manifest as a verdict reads."""
    run.log.store.write(f"data/{'d' * 64}/snapshot.json", json.dumps({"vocab_size": size, "version": 1}).encode())


@pytest.fixture
def with_curve(bard: FabricatedRun) -> FabricatedRun:
    """The run with step records: the second attempt resumed at 20 and trained 21 to 25 again."""
    write_steps(bard.log, 1, range(1, 26), **FALLING)
    write_steps(bard.log, 2, range(21, 34), **FALLING)
    return bard


def test_the_verdict_goes_by_the_surviving_line(with_curve: FabricatedRun) -> None:
    view = diagnose_run(with_curve.log)
    assert (view.verdict.kind, view.step, view.total_steps, view.verdict.numbers["steps"]) == ("healthy", 33, 40, 33)


def test_the_vocabulary_of_the_snapshot_says_what_a_uniform_guess_loses(with_curve: FabricatedRun) -> None:
    give_vocabulary(with_curve, 180)
    view = diagnose_run(with_curve.log).verdict
    assert view.kind == "stuck" and "ln(180) = 5.19" in view.why and view.cures


def test_a_snapshot_whose_vocabulary_is_no_number_counts_as_unread(with_curve: FabricatedRun) -> None:
    damaged = json.dumps({"vocab_size": "many", "version": 1}).encode()
    with_curve.log.store.write(f"data/{'d' * 64}/snapshot.json", damaged)
    assert diagnose_run(with_curve.log).verdict.kind == "healthy"


def test_clipped_slow_and_repeating_steps_are_found_in_the_step_records(bard: FabricatedRun) -> None:
    clipped = {**FALLING, "grad_norm": 4.0}
    write_steps(bard.log, 1, range(1, 20), **FALLING)
    write_steps(bard.log, 2, range(21, 90), **clipped, sample="so")
    write_steps(bard.log, 2, range(90, 99), **{**clipped, "tokens_per_second": 0.1, "seconds": 10.0})
    view = diagnose_run(bard.log).verdict
    assert view.kind == "clipping" and "same text" in view.why and "steps 90 to 98 ran at 0 tokens/s" in view.why


def test_a_run_without_step_records_is_too_early(fresh: FabricatedRun) -> None:
    view = diagnose_run(fresh.log)
    assert (view.verdict.kind, view.step, view.evaluations) == ("too-early", 0, ())


def test_every_evaluation_of_the_line_is_listed_once_in_step_order(with_curve: FabricatedRun) -> None:
    found = [(item.step, item.metrics["val_loss"], item.verdict) for item in diagnose_run(with_curve.log).evaluations]
    assert found == [(10, 3.0, None), (20, 2.0, None)]


def test_people_read_verdict_why_and_cures(with_curve: FabricatedRun, cairn: Cairn) -> None:
    give_vocabulary(with_curve, 180)
    ended = cairn("diagnose", "bard")
    assert ended.code == 0 and all(word in ended.out for word in ("stuck", "uniform guess", "cure 1", "val_loss"))


def test_a_run_that_stopped_early_says_where_and_why(
    with_curve: FabricatedRun, store: LocalStore, cairn: Cairn
) -> None:
    third = with_curve.log.state.newest_committed.committed
    stopped = "val loss 9.0000: 2 evaluations without improving on 2.0000 at step 20"
    body = replace(finished(third.reference), stopped=stopped, rule="patience")
    with_curve.log.append(lambda state: body, writer=writer(2))
    with_curve.end("completed", action="finish")
    words = f"stopped early at step 30: {stopped} (early_stop.patience)"
    status = read_status(with_curve.log)
    assert (status.state, status.stopped_early) == ("finished", words) and words in status.next
    assert list_runs(store)[0].detail == words
    assert diagnose_run(with_curve.log).stopped_early == words
    assert "stopped early at step 30" in cairn("runs").out and cairn("status", "bard").code == 0


def test_the_verdict_of_an_evaluation_is_in_its_json(with_curve: FabricatedRun, cairn: Cairn) -> None:
    state = with_curve.log.state
    judged = CurveVerdict(kind="healthy", why="so", numbers={"train_loss": 2.0})
    body = state.evaluations[-1]
    again = replace(body, verdict=judged)
    with_curve.log.append(lambda state: again, writer=writer())
    listed = json.loads(cairn("evaluations", "bard", "--json").out)
    assert [item["verdict"]["kind"] for item in listed if item["verdict"]] == ["healthy"]
    assert diagnose_run(with_curve.log).evaluations[-1].verdict == judged
