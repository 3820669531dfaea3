"""The chain by its plain functions and by Prefect's tasks: whatever disturbs a run, both do and record the same."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from cairn.flows.run.steps import PLAIN, Chain, Steps, steps_by
from cairn.storage.logs.registry import Registry
from tests.wiring.flow_in_process import FlowWorld, NotedWarmTrainer, answer_for_evaluators

pytestmark = pytest.mark.xdist_group("both-executors")  # each case compares itself with the other executor's
DISTURBANCES = {
    "preempt": "preempt@13",
    "kill": "kill@13",
    "oom": "out-of-memory@13",
    "bad-data": "bad-data@13",
    "evaluator": "none@-1",
}
Execute = Callable[[Callable[[Steps], Any]], Any]


@pytest.fixture(params=["plain", "tasks"])
def execute(request: pytest.FixtureRequest) -> Iterator[Execute]:
    """Call what trains with the steps of one executor; Prefect's are those of a flow run."""
    if request.param == "plain":
        yield lambda train: train(PLAIN)
        return
    with temporary_settings({PREFECT_API_URL: request.getfixturevalue("api_url")}):
        yield lambda train: flow(name="both-executors", persist_result=False)(
            lambda: train(steps_by(Chain().as_task)) and None
        )()


def record_of(world: FlowWorld, waited: list[float]) -> dict[str, Any]:
    """Return what a run has left: bits, receipts, decisions, evaluations and what the alias points at."""
    state, champion = world.log.refresh(), Registry(world.store, "champion").refresh().champion
    receipts = [record.ended for record in state.attempts if record.ended is not None]
    return {
        "bits": [(record.committed.step, record.committed.state_sha256) for record in state.checkpoints],
        "receipts": [
            (end.reason, end.detail.partition("; it used")[0], end.last_step, end.tokens, end.gpu_seconds)
            for end in receipts
        ],
        "decisions": [end.decision for end in receipts],
        "waited": waited,
        "evaluated": [(item.step, dict(item.metrics)) for item in state.evaluations],
        "failed": [item.step for item in state.failed_evaluations],
        "champion": champion and (champion.step, champion.why),
        "finished": state.finished and state.finished.state_sha256,
    }


RECORDS = dict[str, dict[str, Any]]()


@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_both_executors_leave_the_same_bits_receipts_and_decisions(
    disturbance: str, execute: Execute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, warm = FlowWorld(tmp_path), NotedWarmTrainer("--once", DISTURBANCES[disturbance])
    answer_for_evaluators(monkeypatch, world)
    monkeypatch.setattr(random, "random", lambda: 0.5)
    world.evaluators.failures = 1 if disturbance == "evaluator" else 0
    settings = ("checkpoint.every_steps=5", "budgets.evaluator-failed.backoff_seconds=0", "training.micro_batch=4")
    for _ in range(2 if disturbance == "preempt" else 1):
        execute(lambda steps: world.train(*settings, warm=warm, steps=steps))
    record = record_of(world, warm.waited)
    reasons = {"kill": "lost", "preempt": "preempted"}.get(disturbance, disturbance)
    ends = [reason for reason, *_ in record["receipts"]]
    assert ends == (["completed"] if disturbance == "evaluator" else [reasons, "completed"])
    assert record["finished"] is not None and record["champion"] is not None
    assert record == RECORDS.setdefault(disturbance, record), "the other executor left this"
