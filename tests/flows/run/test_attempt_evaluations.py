"""Acting on an early stop: what is waited for, what becomes the run's end, and what a killed one leaves to do."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.flows.run.run_decisions import AttemptEvaluations, finish_run
from cairn.model.configuration.network import ModelConfig
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.run_state import CheckpointState
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal
from cairn.tasks.configuration.settings import EvaluationConfig
from cairn.tasks.evaluator.evaluation_run import EvaluationPlan, suite_of
from tests.fabricated_run import FabricatedRun, configuration

SUITE = suite_of(EvaluationConfig())
PATIENT = ("checkpoint.every_steps=5", "early_stop.patience=1")


def plan(folder: Path) -> EvaluationPlan:
    return EvaluationPlan(
        suite=SUITE,
        model=ModelConfig(),
        snapshot_id="d" * 64,
        cache_dir=folder,
        device="cpu",
        threads=1,
        timeout_seconds=1.0,
    )


def writer(run: FabricatedRun) -> Writer:
    return Writer(host="here", pid=1, attempt=run.log.state.latest_attempt)


def active(run: FabricatedRun, folder: Path, notice: ShutdownSignal | None = None) -> Any:
    return SimpleNamespace(
        log=run.log,
        config=configuration(),
        evaluation=plan(folder),
        host=SimpleNamespace(shutdown=notice or ShutdownSignal()),
        say=lambda words: None,
        writer=lambda attempt: writer(run),
    )


def stopping_of(run: FabricatedRun, folder: Path, notice: ShutdownSignal | None = None) -> AttemptEvaluations:
    return AttemptEvaluations(active(run, folder, notice), run.log.state.latest_attempt)


def finish(run: FabricatedRun, folder: Path) -> bool:
    """Finish the run by its newest attempt; returns whether that appended an entry."""
    before = run.log.refresh().finished
    finish_run(active(run, folder), run.log.state.latest_attempt)
    return run.log.refresh().finished is not before


@pytest.fixture
def worse(fresh: FabricatedRun) -> FabricatedRun:
    """A run with a policy whose second evaluation is worse than its first, and a commit beyond it."""
    fresh.start(overrides=PATIENT)
    for step, loss in ((5, 2.0), (10, 2.5)):
        fresh.evaluate(fresh.commit(step), loss=loss, suite_sha256=SUITE.sha256)
    fresh.commit(15)
    return fresh


def test_the_deciding_step_becomes_the_last_one_and_what_lies_beyond_is_nobodys_resume(
    worse: FabricatedRun, tmp_path: Path
) -> None:
    assert stopping_of(worse, tmp_path).is_over(()) and finish(worse, tmp_path)
    state = worse.log.refresh()
    assert (state.finished.step, state.finished.rule) == (10, "patience")
    assert state.newest_committed.committed.step == 10
    assert state.finished.state_sha256 == state.newest_committed.committed.state_sha256
    beyond = state.checkpoints[-1]
    assert beyond.state == CheckpointState.QUARANTINED and "beyond step 10" in beyond.detail and state.refused == ()


def test_whoever_died_between_any_two_entries_of_the_end_is_continued_to_the_same_end(
    worse: FabricatedRun, tmp_path: Path
) -> None:
    finish(worse, tmp_path)
    worse.end("lost", action="resume")
    worse.start(overrides=PATIENT)
    assert stopping_of(worse, tmp_path).is_over(()), "a finished run must not train on"
    assert not finish(worse, tmp_path) and worse.log.state.finished.attempt == 1


def test_the_next_attempt_finds_the_stop_in_the_log_though_it_resumed_beyond_it(
    worse: FabricatedRun, tmp_path: Path
) -> None:
    worse.end("lost", action="resume")
    worse.start(overrides=PATIENT)
    assert stopping_of(worse, tmp_path).is_over(()) and finish(worse, tmp_path)
    assert worse.log.refresh().finished.step == 10


def test_without_a_policy_nothing_is_waited_for(worse: FabricatedRun, tmp_path: Path) -> None:
    worse.end("lost", action="resume")
    worse.start(overrides=("checkpoint.every_steps=5",))
    never: Any = Future()
    assert not stopping_of(worse, tmp_path).is_over((never,))


def test_an_evaluation_under_way_is_waited_for(worse: FabricatedRun, tmp_path: Path) -> None:
    done: Any = Future()
    done.set_result(None)
    assert stopping_of(worse, tmp_path).is_over((done,))


def test_a_notice_to_leave_ends_the_wait(worse: FabricatedRun, tmp_path: Path) -> None:
    notice = ShutdownSignal()
    notice.request("SIGTERM")
    never: Any = Future()
    assert stopping_of(worse, tmp_path, notice).is_over((never,)), "what the log knows already counts"


def test_evaluations_lost_with_their_flow_are_found_in_step_order(fresh: FabricatedRun, tmp_path: Path) -> None:
    fresh.start(overrides=PATIENT)
    for step in (5, 7, 10):
        fresh.commit(step)
    fresh.end("lost", action="resume")
    fresh.start(overrides=PATIENT)
    assert [reference.step for _, reference in stopping_of(fresh, tmp_path).missing()] == [5, 10]


def test_a_commit_beside_the_rhythm_is_not_due(worse: FabricatedRun, tmp_path: Path) -> None:
    stopping = stopping_of(worse, tmp_path)
    assert [step for step in (5, 7, 10, 12) if stopping.is_due(step)] == [5, 10]
