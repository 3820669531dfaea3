"""The chain by its plain functions and by Prefect's tasks: whatever disturbs a run, both do and record the same."""

import random
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from cairn.flows.run.steps import PLAIN, Chain, Steps, steps_by
from cairn.storage.logs.registry import Registry
from tests.wiring.flow_in_process import FlowWorld, NotedWarmTrainer, answer_for_evaluators

DISTURBED = "preempt@3,bad-data@8,kill@13,out-of-memory@18"
SETTINGS = ("checkpoint.every_steps=5", "budgets.evaluator-failed.backoff_seconds=0", "training.micro_batch=4")


def disturbed_run(folder: Path, patch: pytest.MonkeyPatch, executor: Steps) -> dict[str, Any]:
    """Train a run that meets everything, its first evaluator fails too; return what it has left."""
    folder.mkdir()
    world, warm = FlowWorld(folder), NotedWarmTrainer("--once", DISTURBED)
    answer_for_evaluators(patch, world)
    world.evaluators.failures = 1
    for _ in ("until it is preempted", "to its end"):
        world.train(*SETTINGS, warm=warm, steps=executor)
    return record_of(world, warm.waited)


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


def test_both_executors_leave_the_same_bits_receipts_and_decisions(
    api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.5)
    plain = disturbed_run(tmp_path / "plain", monkeypatch, PLAIN)
    records = list[dict[str, Any]]()

    @flow(name="both-executors", persist_result=False)
    def train_by_tasks() -> None:
        records.append(disturbed_run(tmp_path / "tasks", monkeypatch, steps_by(Chain().as_task)))

    with temporary_settings({PREFECT_API_URL: api_url}):
        train_by_tasks()
    reasons = [reason for reason, *_ in plain["receipts"]]
    assert reasons == ["preempted", "bad-data", "lost", "oom", "completed"]
    assert plain["failed"] and plain["finished"] is not None and plain["champion"] is not None
    assert records == [plain]
