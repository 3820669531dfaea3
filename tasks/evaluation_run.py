"""Evaluate one committed checkpoint under one suite, and put the outcome on record.

Owns the evaluator process from outside, and re-use: equal manifest, suite and data are measured once. Refuses torch:
the weights are the child's business.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from storage.entry_log import this_writer, utc_now
from storage.run_entries import CheckpointReference, EvaluationFailed, EvaluationRecorded
from storage.run_log import RunLog
from storage.run_state import RunState
from tasks.evaluation_suite import Suite

if TYPE_CHECKING:
    from model.configuration import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlan:
    """How a run's checkpoints are measured."""

    suite: Suite
    model: "ModelConfig"
    snapshot_id: str
    cache_dir: Path
    device: str
    threads: int
    timeout_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    result: bytes
    problem: str


def find_evaluation(state: RunState, manifest_sha256: str, suite_sha256: str) -> EvaluationRecorded | None:
    """Return the evaluation of exactly these weights under exactly this suite, newest first, or None."""
    wanted = (manifest_sha256, suite_sha256)
    return next((e for e in reversed(state.evaluations) if (e.manifest_sha256, e.suite_sha256) == wanted), None)


def record_evaluation(
    log: RunLog, reference: CheckpointReference, plan: EvaluationPlan, *, clock: Callable[[], datetime] = utc_now
) -> EvaluationRecorded | EvaluationFailed:
    """Measure the checkpoint unless that is on record, and append what came of it; never raises for the evaluator."""
    known = find_evaluation(log.refresh(), reference.manifest_sha256, plan.suite.sha256)
    if known is not None:
        return known
    started_at, started = clock(), time.monotonic()
    outcome = _run_evaluator(_order(log, reference, plan), plan.timeout_seconds)
    body = _body(outcome, reference, plan, started_at, time.monotonic() - started)
    log.append(lambda state: body, writer=this_writer())
    return body


def _order(log: RunLog, reference: CheckpointReference, plan: EvaluationPlan) -> bytes:
    order = {
        "store_url": log.store.url,
        "snapshot_id": plan.snapshot_id,
        "model": plan.model.model_dump(mode="json"),
        "checkpoint": reference,
        "suite": plan.suite,
        "cache_dir": str(plan.cache_dir),
        "device": plan.device,
        "threads": plan.threads,
    }
    return msgspec.json.encode(order)


def _run_evaluator(order: bytes, timeout_seconds: float) -> _Outcome:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tasks.evaluator"],
            input=order,
            capture_output=True,
            timeout=timeout_seconds,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _Outcome(result=b"", problem=f"the evaluator did not answer within {timeout_seconds:g} s")
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing on stderr"]
        return _Outcome(result=b"", problem=f"the evaluator exited with {done.returncode}: {tail[0]}")
    return _Outcome(result=done.stdout, problem="")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Printed:
    metrics: dict[str, float]
    samples: tuple[str, ...]


def _body(
    outcome: _Outcome, reference: CheckpointReference, plan: EvaluationPlan, started_at: datetime, seconds: float
) -> EvaluationRecorded | EvaluationFailed:
    problem = outcome.problem
    if not problem:
        try:
            printed = msgspec.json.decode(outcome.result, type=_Printed)
            return EvaluationRecorded(
                step=reference.step,
                manifest_sha256=reference.manifest_sha256,
                suite=plan.suite.name,
                suite_sha256=plan.suite.sha256,
                data_snapshot=plan.snapshot_id,
                metrics=printed.metrics,
                samples=printed.samples,
                evaluator_version=plan.suite.evaluator_version,
                started_at=started_at,
                seconds=seconds,
            )
        except msgspec.DecodeError as error:
            problem = f"the evaluator printed nonsense: {error}"
    return EvaluationFailed(
        step=reference.step,
        manifest_sha256=reference.manifest_sha256,
        suite=plan.suite.name,
        suite_sha256=plan.suite.sha256,
        data_snapshot=plan.snapshot_id,
        detail=problem,
        started_at=started_at,
        seconds=seconds,
    )
