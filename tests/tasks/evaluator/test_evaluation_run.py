"""What is measured once, what is measured again, and what is put on record: without a process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn.model.configuration.network import ModelConfig
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_entries import EvaluationFailed, EvaluationRecorded
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.configuration.settings import BudgetConfig, EvaluationConfig, EvaluatorConfig
from cairn.tasks.errors import CheckpointGone, EvaluationInterrupted
from cairn.tasks.evaluator.evaluation_run import (
    EvaluationPlan,
    Measure,
    Measurement,
    find_evaluation,
    record_evaluation,
    suite_of,
)
from cairn.tasks.evaluator.evaluator_process import Outcome
from tests.memory_store import MemoryStore
from tests.storage.builders import run_with_commits


class Evaluator:
    """Prints what it is told to, one thing after the other, and counts how often it was run."""

    def __init__(self, *outcomes: str | float) -> None:
        self.outcomes, self.specs = list(outcomes), list[dict[str, Any]]()

    def __call__(self, spec: bytes, timeout_seconds: float) -> Outcome:
        self.specs.append(json.loads(spec))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, str):
            return Outcome(result=b"", problem=outcome)
        return Outcome(result=json.dumps({"metrics": {"val_loss": outcome}, "samples": []}).encode(), problem="")


@pytest.fixture
def log() -> RunLog:
    return run_with_commits(MemoryStore(), 10, 20)


@pytest.fixture
def plan(tmp_path: Path) -> EvaluationPlan:
    return EvaluationPlan(
        suite=suite_of(EvaluationConfig()),
        model=ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8),
        snapshot_id="d" * 64,
        cache_dir=tmp_path / "cache" / "snapshots",
        device="cpu",
        threads=1,
        timeout_seconds=1.0,
        budget=BudgetConfig(retries=1),
    )


def newest(log: RunLog) -> CheckpointReference:
    return log.refresh().readable[0].committed.reference


def record(
    log: RunLog, reference: CheckpointReference, plan: EvaluationPlan, *, measure: Measure, **asked: Any
) -> EvaluationRecorded | EvaluationFailed:
    asked = {"on_request": True} | asked
    return record_evaluation(log, Measurement(reference=reference, plan=plan, **asked), measure=measure)


def losses(log: RunLog) -> list[float]:
    return [item.metrics["val_loss"] for item in log.refresh().evaluations]


def of_command(plan: EvaluationPlan, name: str = "words") -> EvaluationPlan:
    suite = EvaluatorConfig(name=name, command=("true",), folder="/", timeout_seconds=1.0, files={})
    return replace(plan, suite=suite)


def test_what_is_on_record_is_not_measured_again(log: RunLog, plan: EvaluationPlan) -> None:
    first = record(log, newest(log), plan, measure=Evaluator(2.0))
    assert record(log, newest(log), plan, measure=Evaluator()) == first
    assert losses(log) == [2.0]


def test_asked_to_it_is_measured_again_and_the_newest_counts(log: RunLog, plan: EvaluationPlan) -> None:
    record(log, newest(log), plan, measure=Evaluator(2.0))
    record(log, newest(log), plan, again=True, measure=Evaluator("it fell over", 3.0))
    found = find_evaluation(log.state, newest(log).manifest_sha256, plan.suite.sha256, plan.snapshot_id)
    assert losses(log) == [2.0, 3.0] and found is not None and found.metrics["val_loss"] == 3.0


@pytest.mark.parametrize("other", ["weights", "suite", "snapshot"])
def test_other_weights_another_suite_or_other_data_is_another_evaluation(
    log: RunLog, plan: EvaluationPlan, other: str
) -> None:
    record(log, newest(log), plan, measure=Evaluator(2.0))
    reference = log.state.readable[1].committed.reference if other == "weights" else newest(log)
    if other == "suite":
        plan = replace(plan, suite=suite_of(EvaluationConfig(batches=7)))
    elif other == "snapshot":
        plan = replace(plan, snapshot_id="e" * 64)
    record(log, reference, plan, measure=Evaluator(3.0))
    assert losses(log) == [2.0, 3.0]


def test_every_suite_has_a_retry_of_its_own(log: RunLog, plan: EvaluationPlan) -> None:
    record(log, newest(log), plan, measure=Evaluator("one", "two"))
    own = record(log, newest(log), of_command(plan), measure=Evaluator("three", 4.0))
    assert isinstance(own, EvaluationRecorded)
    assert [item.suite for item in log.state.failed_evaluations] == ["held-out", "held-out", "words"]


@pytest.mark.parametrize("kind", ["held-out", "command"])
def test_an_evaluation_records_the_evaluator_version_of_its_suites_identity(
    log: RunLog, plan: EvaluationPlan, kind: str
) -> None:
    plan = plan if kind == "held-out" else of_command(plan)
    body = record(log, newest(log), plan, measure=Evaluator(2.0))
    assert isinstance(body, EvaluationRecorded)
    assert body.evaluator_version == {"held-out": "2", "command": "1"}[kind] == plan.suite.evaluator_version


def test_a_spent_budget_is_final_unless_somebody_asks(log: RunLog, plan: EvaluationPlan) -> None:
    failed = record(log, newest(log), plan, measure=Evaluator("one", "two"))
    assert record(log, newest(log), plan, on_request=False, measure=Evaluator()) == failed
    requested = record(log, newest(log), plan, measure=Evaluator(2.0))
    assert isinstance(requested, EvaluationRecorded)


def test_nonsense_is_a_failure_on_record(log: RunLog, plan: EvaluationPlan) -> None:
    nonsense = Outcome(result=b"half a docu", problem="")
    failed = record(
        log, newest(log), replace(plan, budget=BudgetConfig(retries=0)), measure=lambda spec, seconds: nonsense
    )
    assert isinstance(failed, EvaluationFailed) and failed.detail.startswith("the evaluator printed nonsense")


def test_two_evaluators_of_the_same_leave_one_outcome_and_no_pin(log: RunLog, plan: EvaluationPlan) -> None:
    def outrun(spec: bytes, timeout_seconds: float) -> Outcome:
        record(RunLog(log.store, log.run_id), newest(log), plan, measure=Evaluator(2.0))
        return Evaluator(9.0)(spec, timeout_seconds)

    body = record(log, newest(log), plan, during_attempt=log.state.latest_attempt, measure=outrun)
    assert isinstance(body, EvaluationRecorded) and body.metrics["val_loss"] == 2.0
    assert losses(log) == [2.0] and log.state.pins == ()


@pytest.mark.parametrize("other", ["the same suite", "another suite"])
def test_the_end_of_one_evaluation_leaves_the_pin_of_another(log: RunLog, plan: EvaluationPlan, other: str) -> None:
    pins = []

    def outlast(spec: bytes, timeout_seconds: float) -> Outcome:
        own = {pin.pin_id for pin in log.refresh().pins}
        beside = plan if other == "the same suite" else of_command(plan)
        record(RunLog(log.store, log.run_id), newest(log), beside, measure=Evaluator(2.0))
        pins.append((own, {pin.pin_id for pin in log.refresh().pins}))
        return Evaluator(9.0)(spec, timeout_seconds)

    record(log, newest(log), plan, measure=outlast)
    ((before, after),) = pins
    assert len(before) == 1 and after == before


def test_an_interrupted_one_leaves_nothing_on_record(log: RunLog, plan: EvaluationPlan) -> None:
    def interrupted(spec: bytes, timeout_seconds: float) -> Outcome:
        raise EvaluationInterrupted("leaving")

    with pytest.raises(EvaluationInterrupted):
        record(log, newest(log), plan, measure=interrupted)
    assert (log.refresh().evaluations, log.state.failed_evaluations) == ((), ())


def test_an_evaluator_of_ones_own_gets_a_folder_that_is_gone_afterwards(log: RunLog, plan: EvaluationPlan) -> None:
    evaluator = Evaluator(1.0)
    record(log, newest(log), of_command(plan), measure=evaluator)
    folder = Path(evaluator.specs[0]["folder"])
    assert folder.parent == plan.cache_dir.parent / "evaluations" and not folder.exists()


def test_a_checkpoint_that_is_not_committed_is_not_measured(log: RunLog, plan: EvaluationPlan) -> None:
    gone = replace(newest(log), prefix="runs/bard/checkpoints/step-99999999-attempt-0001")
    with pytest.raises(CheckpointGone):
        record(log, gone, plan, measure=Evaluator())


def test_a_refused_command_is_not_run_and_spends_no_budget(log: RunLog, plan: EvaluationPlan) -> None:
    of_log = of_command(plan)
    assert isinstance(of_log.suite, EvaluatorConfig)
    of_log, evaluator = replace(of_log, suite=of_log.suite.model_copy(update={"logged": True})), Evaluator(1.0)
    for _ in range(5):
        refused = record(log, newest(log), of_log, measure=evaluator)
        assert isinstance(refused, EvaluationFailed) and refused.refused
    assert evaluator.specs == []
    assert isinstance(
        record(log, newest(log), of_command(plan), on_request=False, measure=evaluator), EvaluationRecorded
    )
