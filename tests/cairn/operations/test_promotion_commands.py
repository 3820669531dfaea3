"""`cairn promote` and its gates, and how sure a promotion is that one checkpoint is better than another."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.flows.run.run_decisions import PromotionApproval, ask, describe
from cairn.operations.checks import verify_run
from cairn.operations.person_decisions import roll_back
from cairn.reports.queries.alias_history import list_decisions, list_promotions
from cairn.reports.queries.run_lookup import configuration_of
from cairn.storage.checkpoints.resume_point import quarantine_checkpoint
from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.registry import Promoted, Registry
from cairn.storage.logs.window_losses import losses_folder
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.evaluator.evaluation_run import suite_of
from tests.commands import Cairn
from tests.fabricated_run import FabricatedRun, fabricate, promote

HUMAN = Writer(host="here", pid=1)


@pytest.fixture
def three(bard: FabricatedRun, store: LocalStore) -> FabricatedRun:
    """The run whose steps 10, 20 and 30 were each the champion, in that order."""
    promote(store, "bard", bard.log.state.readable[0].committed.reference, loss=1.0, alias="champion")
    return bard


def champion(store: LocalStore) -> Promoted:
    body = Registry(store, "champion").refresh().champion
    assert body is not None
    return body


def test_rolling_back_twice_walks_back_twice(three: FabricatedRun, store: LocalStore) -> None:
    steps = [roll_back(store, "champion", by="ann").step for _ in range(2)]
    assert (steps, champion(store).step) == ([20, 10], 10)


def test_a_rollback_says_who_why_and_what_it_left(three: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    assert cairn("rollback", "--why", "it repeats itself").code == 0
    view = list_decisions(store)[0]
    assert (view.kind, view.step, view.why) == (
        "rolled-back",
        20,
        "from bard@30 back to bard@20: it repeats itself",
    )
    assert "@" in view.by and view.previous == three.log.state.readable[0].committed.manifest_sha256


def test_a_rollback_passes_over_weights_that_are_quarantined(three: FabricatedRun, store: LocalStore) -> None:
    broken = three.log.state.readable[1].committed
    quarantine_checkpoint(three.log, broken, "a flipped byte", writer=HUMAN)
    assert roll_back(store, "champion", by="ann").step == 10
    assert [view.step for view in list_promotions(store)] == [10]


def test_a_rollback_passes_over_weights_whose_bytes_are_gone(three: FabricatedRun, store: LocalStore) -> None:
    store.delete(f"{three.log.state.readable[1].committed.prefix}/weights-00001-of-00001.safetensors")
    assert roll_back(store, "champion", by="ann").step == 10


def test_a_rollback_to_nothing_that_can_be_read_is_refused_and_says_what_is_wrong(
    three: FabricatedRun, cairn: Cairn, store: LocalStore
) -> None:
    for record in three.log.state.readable[1:]:
        store.delete(f"{record.committed.prefix}/manifest.json")
    with pytest.raises(IntegrityError, match=r"bard@20 has no manifest.*bard@10 has no manifest"):
        roll_back(store, "champion", by="ann")
    assert (cairn("rollback").code, champion(store).step) == (5, 30)


def test_the_history_keeps_what_was_undone_and_what_was_refused(
    three: FabricatedRun, cairn: Cairn, store: LocalStore
) -> None:
    roll_back(store, "champion", by="ann")
    assert cairn("promote", "bard@10", "--why", "nostalgia").code == 3
    views = list_decisions(store)
    assert [(view.kind, view.step, view.gate) for view in views] == [
        ("refused", 10, "better"),
        ("rolled-back", 20, None),
        ("promoted", 30, None),
        ("promoted", 20, None),
        ("promoted", 10, None),
    ]
    assert (views[0].why, "must be below" in (views[0].detail or "")) == ("nostalgia", True)


def test_the_history_as_text_has_every_decision(three: FabricatedRun, cairn: Cairn) -> None:
    assert cairn("models", "--history").out.count("promoted") >= 3


def test_a_promotion_by_hand_carries_the_persons_words(bard: FabricatedRun, cairn: Cairn, store: LocalStore) -> None:
    bard.evaluate(bard.log.state.readable[0].committed.reference, loss=1.0)
    assert cairn("promote", "bard@30", "--why", "it rhymes").code == 0
    assert champion(store).why == "val_loss 1.0000, before 2.0000: better by 1.0000, no error is known: it rhymes"


def test_nobody_is_asked_where_no_server_is_named(bard: FabricatedRun, store: LocalStore) -> None:
    run: Any = SimpleNamespace(flow_run_id="0" * 8 + "-0000-0000-0000-" + "0" * 12)
    answer = ask(run, Registry(store, "champion"), champion(store), 60)
    assert isinstance(answer, str) and "PREFECT_API_URL" in answer


def test_the_question_shows_both_checkpoints_with_their_numbers(bard: FabricatedRun, store: LocalStore) -> None:
    text = describe(champion(store), champion(store))
    assert "| val_loss | 2.0000 | 2.0000 |" in text and "bard@20" in text


def test_the_form_wants_a_name() -> None:
    with pytest.raises(ValueError, match="by"):
        PromotionApproval(approve=True, by="")


def test_reading_the_history_needs_no_folder_of_the_runs(
    three: FabricatedRun, store: LocalStore, tmp_path: Path
) -> None:
    for key in store.keys("runs"):
        store.delete(key)
    assert len(list_decisions(store)) == 3


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
