"""How sure a promotion is: the difference and its error in every command that shows one, from losses kept by window."""

import json

import pytest

from cairn.operations.checks import verify_run
from cairn.reports.queries.run_lookup import configuration_of
from cairn.storage.logs.window_losses import losses_folder
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.evaluator.evaluation_run import suite_of
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun, fabricate

WORDS = "better by 0.2500 ± 0.0180"


def measured(store: LocalStore, run_id: str, loss: float, swing: float) -> FabricatedRun:
    """A run with one checkpoint whose losses swing from block to block of its 320 windows."""
    run = fabricate(store, run_id)
    run.start()
    losses = [loss + swing * (-1) ** (index // 10) for index in range(320)]
    suite_sha256 = suite_of(configuration_of(run.log.state).evaluation).sha256
    run.evaluate(run.commit(10), loss=loss, losses=losses, suite_sha256=suite_sha256)
    run.end("preempted", action="resume", charged="preempted")
    return run


@pytest.fixture
def two(store: LocalStore, cairn: Cairn) -> tuple[FabricatedRun, FabricatedRun]:
    """A champion and a better run."""
    runs = measured(store, "old", 3.0, 0.2), measured(store, "new", 2.75, 0.1)
    assert cairn("promote", "old").code == 0
    return runs


@pytest.mark.usefixtures("two")
def test_a_promotion_says_how_much_better_and_how_sure(cairn: Cairn) -> None:
    promoted = cairn("promote", "new")
    assert (promoted.code, WORDS in cairn("models").out) == (0, True)
    found = json.loads(cairn("models", "--json").out)[0]["evaluation"]
    assert (found["better_by"], round(found["better_by_error"], 4)) == (0.25, 0.018)
    assert [item["metric"] for item in found["differences"]] == ["val_loss"]


@pytest.mark.usefixtures("two")
def test_sql_and_the_report_have_the_error_too(cairn: Cairn) -> None:
    cairn("promote", "new")
    asked = "select better_by, round(better_by_error, 4) as error from promotions where run_id = 'new'"
    assert json.loads(cairn("sql", asked, "--json").out) == [{"better_by": 0.25, "error": 0.018}]
    assert WORDS in cairn("report", "new").out


@pytest.mark.usefixtures("two")
def test_runs_are_compared_with_the_first_one_over_the_same_windows(cairn: Cairn) -> None:
    first, second = json.loads(cairn("compare", "old", "new", "--json").out)["runs"]
    assert (first["better_by"], first["versus_first"]) == (None, None)
    assert (second["better_by"], second["versus_first"]) == (0.25, f"{WORDS} than old@10")
    assert f"{WORDS} than old@10" in cairn("compare", "old", "new").out


def test_runs_of_other_suites_are_not_compared(store: LocalStore, cairn: Cairn) -> None:
    for run_id, suite in (("one", "a" * 64), ("two", "b" * 64)):
        run = fabricate(store, run_id)
        run.start()
        run.evaluate(run.commit(10), loss=2.0, suite_sha256=suite)
    second = json.loads(cairn("compare", "one", "two", "--json").out)["runs"][1]
    assert second["better_by"] is None and "was measured under another suite" in second["versus_first"]


def test_a_damaged_object_is_named_by_verify_and_refuses_the_promotion(
    two: tuple[FabricatedRun, FabricatedRun], store: LocalStore, cairn: Cairn
) -> None:
    (key,) = store.keys(losses_folder(two[0].log.prefix))
    store.write(key, b"{}")
    assert any(key in problem and "--again" in problem for problem in verify_run(store, "old").problems)
    refused = cairn("promote", "new")
    assert (refused.code, "losses by window cannot be read" in refused.err) == (3, True)


def test_a_deleted_run_keeps_no_losses_by_window(
    two: tuple[FabricatedRun, FabricatedRun], store: LocalStore, cairn: Cairn
) -> None:
    assert cairn("delete", "new", "--yes").code == 0
    assert store.keys(losses_folder(two[1].log.prefix)) == []
    assert not [problem for problem in verify_run(store, "new").problems if "window-losses" in problem]
