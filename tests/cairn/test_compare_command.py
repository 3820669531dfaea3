"""`cairn compare`: runs beside each other, on the terminal, as JSON and as a picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.reports.queries.run_comparison import compare_runs, find_runs
from cairn.reports.text.display_tables import compared_runs_table
from cairn.storage.stores.local_store import LocalStore
from tests.commands import ROOT, Cairn
from tests.fabricated_run import FabricatedRun, fabricate, write_steps

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
