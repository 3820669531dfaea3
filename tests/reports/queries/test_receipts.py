"""What receipts, checkpoints, evaluations and a status say; their fields: tests/cairn/cli/test_help.py."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from cairn.reports.queries.alias_history import list_promotions
from cairn.reports.queries.evaluations import list_evaluations
from cairn.reports.queries.post_mortem import gather_post_mortem
from cairn.reports.queries.receipts import count_reasons, read_receipts
from cairn.reports.queries.run_lookup import read_beat, read_checkpoints, tokens_per_step
from cairn.reports.queries.run_status import list_runs, read_status
from cairn.reports.text.answer_text import describe_speed
from cairn.reports.text.post_mortem_text import post_mortem_answer
from cairn.storage.logs.step_log import step_log_key
from cairn.storage.stores.codec import encode
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.attempt.attempt_entries import evidence_document
from cairn.tasks.policy.failures import Evidence, classify
from cairn.tasks.text.format import format_duration
from tests import fabricated_run
from tests.entries import gone_placement, placement, step_record
from tests.fabricated_run import FabricatedRun


def printed(view: object) -> Any:
    return json.loads(encode(view))


def test_a_receipt_says_where_the_attempt_ran(bard: FabricatedRun) -> None:
    placement = printed(read_receipts(bard.log, read_beat(bard.log)))[0]["placement"]
    machine = {"host": "elsewhere", "nodes": 5, "nodes_wanted": 6, "cores": 7, "threads": 3}
    machine |= {"boot_id": "b", "pid_namespace": "pid:[4]", "start_ticks": 1250}
    machine |= {"continued_by": "prefect deployment train-gpt/weekly", "hosts": ["here", "n1"]}
    assert placement == {**machine, "pid": 11, "device": "cpu", "device_name": "a CPU", "world_size": 2}


def test_a_receipt_says_what_mfu_is_a_share_of(bard: FabricatedRun) -> None:
    ended, still_open = printed(read_receipts(bard.log, read_beat(bard.log)))
    assert ended["peak"] == {"flops": 3e12, "source": "measured"}
    assert still_open["peak"] == {"flops": 4e12, "source": "data sheet"}


def test_a_receipt_books_the_wait_since_the_opening_or_the_last_sign_of_life(bard: FabricatedRun) -> None:
    ended, still_open = printed(read_receipts(bard.log, read_beat(bard.log)))
    assert (ended["waiting_seconds"], ended["starting_seconds"]) == (1.0, 2.25)
    first, second = bard.log.state.attempts
    assert first.ended is not None and first.ended.last_seen_at is not None and first.ended_at is not None
    waited = (second.started_at - first.ended.last_seen_at).total_seconds()
    assert still_open["waiting_seconds"] == waited > (second.started_at - first.ended_at).total_seconds()


def test_an_injected_fault_is_marked_in_receipt_status_explanation_and_table(fresh: FabricatedRun) -> None:
    fresh.start(faults="preempt@7,kill@30")
    evidence = Evidence(exit_code=-9, injected=("kill@30",))
    fresh.end("lost", action="resume", detail=classify(evidence).detail, evidence=evidence_document(evidence))
    (receipt,) = read_receipts(fresh.log, read_beat(fresh.log))
    assert receipt.injected == ("kill@30",) and (receipt.detail or "").startswith("injected (kill@30): ")
    assert read_status(fresh.log).injected.endswith("; kill@30 ended attempt 1")
    told = post_mortem_answer(gather_post_mortem(fresh.log))
    assert "This end was injected: CAIRN_FAULTS lists kill@30." in told
    counted = count_reasons([receipt, replace(receipt, injected=())])
    assert {row.reason for row in counted} == {"lost", "lost (injected)"}


@pytest.mark.parametrize(
    ("nodes", "reason", "evidence", "host"),
    [
        (2, "lost", Evidence(exit_code=-9, lost_machine="machine 1, n1, is gone", lost_host="n1"), "n1"),
        (2, "lost", Evidence(), "here"),
        (1, "hung", Evidence(silent_seconds=9.0), "here"),
        (2, "hung", Evidence(silent_seconds=9.0), None),
        (1, "lost", Evidence(exit_code=-9, injected=("kill@30",)), None),
        (1, "oom", Evidence(oom_kills=1), None),
    ],
    ids=["another", "the first", "hung", "hung on several", "injected", "of the run itself"],
)
def test_a_receipt_names_the_machine_that_was_lost_or_hung(
    fresh: FabricatedRun, nodes: int, reason: str, evidence: Evidence, host: str | None
) -> None:
    fresh.start(placement=placement(nodes=nodes))
    fresh.end(reason, action="resume", evidence=evidence_document(evidence))
    (receipt,) = read_receipts(fresh.log, read_beat(fresh.log))
    assert receipt.failed_host == host


def test_a_receipt_says_what_was_decided(bard: FabricatedRun) -> None:
    assert printed(read_receipts(bard.log, read_beat(bard.log)))[0]["decision"] == {
        "action": "resume",
        "reason": "so it was decided",
        "charged": "preempted",
        "left": {"retries": 3},
        "delay_seconds": 4.25,
        "micro_batch": None,
        "activation_checkpointing": None,
        "changed": "nothing",
    }


def test_an_open_attempt_has_no_reason_sets_out_from_its_commit_and_is_as_far_as_its_heartbeat(
    bard: FabricatedRun,
) -> None:
    second = read_receipts(bard.log, read_beat(bard.log))[1]
    assert (second.termination_reason, second.last_step) == (None, 33)
    assert (second.first_step, second.resumed_from_step) == (20, 20)


def test_times_are_iso_8601_in_utc(bard: FabricatedRun) -> None:
    assert printed(read_receipts(bard.log, read_beat(bard.log)))[0]["started_at"] == "2026-01-01T12:00:01Z"


def test_a_staged_checkpoint_is_shown_as_writing(bard: FabricatedRun) -> None:
    states = [(item.step, item.state) for item in read_checkpoints(bard.log)]
    assert states == [(10, "committed"), (20, "committed"), (30, "committed"), (40, "writing")]


def test_a_failed_evaluation_is_listed_with_its_detail(bard: FabricatedRun) -> None:
    failed = list_evaluations(bard.log.state)[-1]
    assert (failed.status, failed.detail) == ("failed", "it exited with 1")


def test_the_present_champion_comes_first(bard: FabricatedRun, store: LocalStore) -> None:
    assert [(view.step, view.current) for view in list_promotions(store)] == [(20, True), (10, False)]


def test_the_status_of_a_run_that_trains_has_its_speed_and_the_time_left_at_it(bard: FabricatedRun) -> None:
    owner = bard.log.state.open_attempt
    assert owner is not None
    record = step_record(30, owner.started.attempt, tokens_per_second=50.0)
    key = step_log_key(bard.log.prefix, record.attempt, owner.started.claim_id)
    bard.log.store.write(key, msgspec.json.encode(record) + b"\n")
    status, each = read_status(bard.log), tokens_per_step(bard.log.state)
    left = (status.total_steps - status.step) * each / 50.0
    assert (status.tokens_per_second, status.seconds_left) == (50.0, left) and left > 0
    assert describe_speed(status) == f"50 tokens/s, {format_duration(left)} to go"


def test_a_run_that_does_not_train_has_no_speed(bard: FabricatedRun) -> None:
    bard.end("preempted", action="resume", charged="preempted")
    status = read_status(bard.log)
    assert (status.tokens_per_second, status.seconds_left, describe_speed(status)) == (None, None, "")


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
