from dataclasses import replace

import pytest

from cairn.reports.queries.run_status import list_runs, read_status
from cairn.storage.stores.local_store import LocalStore
from tests import fabricated_run
from tests.entries import gone_placement, placement
from tests.fabricated_run import FabricatedRun


def test_a_run_without_attempts_is_opened(fresh: FabricatedRun) -> None:
    assert read_status(fresh.log).state == "opened"


def test_a_run_whose_owner_may_live_is_running_names_it_and_is_at_the_step_its_heartbeat_says(
    bard: FabricatedRun,
) -> None:
    status = read_status(bard.log)
    assert (status.state, status.step) == ("running", 33)
    assert status.owner is not None and status.owner.host == "elsewhere"


def test_a_run_whose_owner_is_known_dead_is_interrupted(fresh: FabricatedRun) -> None:
    fresh.start(placement=gone_placement())
    status = read_status(fresh.log)
    assert (status.state, status.owner) == ("interrupted", None)


@pytest.mark.parametrize(
    ("reason", "action", "state"),
    [
        ("preempted", "resume", "interrupted"),
        ("cancelled", "stop", "interrupted"),
        ("paused", "stop", "paused"),
        ("error", "stop", "stopped"),
        ("lost", "stop", "stopped"),
    ],
)
def test_an_ended_attempt_leaves_the_run_resumable_or_to_a_person(
    fresh: FabricatedRun, reason: str, action: str, state: str
) -> None:
    fresh.start()
    fresh.end(reason, action=action)
    assert read_status(fresh.log).state == state


def test_a_run_with_its_last_step_committed_is_finished(fresh: FabricatedRun) -> None:
    fresh.start()
    fresh.complete()
    assert read_status(fresh.log).state == "finished"


def test_an_interrupted_run_stands_at_its_newest_commit(fresh: FabricatedRun) -> None:
    fresh.start()
    fresh.commit(10)
    fresh.end("preempted", action="resume", charged="preempted")
    assert read_status(fresh.log).step == 10


def test_a_budget_shows_what_was_charged_since_the_last_progress(fresh: FabricatedRun) -> None:
    for _ in range(2):
        fresh.start()
        fresh.end("lost", action="resume", charged="lost")
    budget = read_status(fresh.log).budgets["lost"]
    assert (budget.spent, budget.left, budget.spent_total) == (2, 18, 2)


def test_a_refilled_budget_has_nothing_spent_but_keeps_its_total(bard: FabricatedRun, fresh: FabricatedRun) -> None:
    fresh.start()
    fresh.end("lost", action="resume", charged="lost")
    fresh.start()
    fresh.commit(10)
    budget = read_status(fresh.log).budgets["lost"]
    assert (budget.spent, budget.left, budget.spent_total) == (0, 20, 1)


def test_what_happens_next_names_the_command(fresh: FabricatedRun) -> None:
    assert "cairn train --run-id fresh" in read_status(fresh.log).next


@pytest.mark.unsound_log
def test_an_unreadable_run_does_not_hide_the_others(bard: FabricatedRun, store: LocalStore) -> None:
    store.create("runs/broken/log/9999999999.json", b"not an entry")
    assert [(row.run_id, row.state) for row in list_runs(store)] == [("bard", "running"), ("broken", "unreadable")]


def test_a_store_that_does_not_exist_has_no_runs(store: LocalStore) -> None:
    assert list_runs(store) == ()


@pytest.mark.parametrize("reason", ["error", "bad-data", "cancelled"])
def test_a_deployed_run_that_waits_for_a_person_names_the_flow_run_that_has_its_launch(
    fresh: FabricatedRun, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fabricated_run, "HUMAN", replace(fabricated_run.HUMAN, flow_run_id="7"))
    fresh.start(placement=placement(continued_by="prefect deployment train-gpt/train-gpt"))
    fresh.end(reason, action="stop")
    assert "`prefect flow-run retry 7` continues from step 0" in read_status(fresh.log).next


@pytest.mark.parametrize("only_there", ['exporters.tensorboard="curves"', 'evaluation.command=["true"]'])
def test_a_run_with_words_that_are_not_taken_from_its_log_is_continued_with_its_configuration(
    fresh: FabricatedRun, only_there: str
) -> None:
    fresh.start(overrides=[only_there])
    fresh.end("error", action="stop")
    assert "`cairn train CONFIG --run-id" in read_status(fresh.log).next
