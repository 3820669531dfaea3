"""Evaluate one committed checkpoint under one suite, and put the outcome on record.

Owns the evaluator process from outside, and re-use: equal manifest, suite and data are measured once. Refuses torch:
the weights are the child's business.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from storage.checkpoint_hold import hold_checkpoint, new_hold
from storage.entry_log import this_writer, utc_now
from storage.run_entries import CheckpointReference, EvaluationFailed, EvaluationRecorded
from storage.run_log import RunLog
from storage.run_state import COMMITTED, RunState
from tasks.budgets import evaluator_retries_left
from tasks.errors import CheckpointGone
from tasks.evaluation_suite import Suite
from tasks.settings import BudgetConfig
from tasks.this_machine import this_placement

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
    budget: BudgetConfig = field(default_factory=lambda: BudgetConfig(retries=0))
    faults: str = ""
    mask_documents: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the evaluator printed, or what was wrong with it."""

    result: bytes
    problem: str


def find_evaluation(state: RunState, manifest_sha256: str, suite_sha256: str) -> EvaluationRecorded | None:
    """Return the evaluation of exactly these weights under exactly this suite, newest first, or None."""
    wanted = (manifest_sha256, suite_sha256)
    return next((e for e in reversed(state.evaluations) if (e.manifest_sha256, e.suite_sha256) == wanted), None)


def hold_for_evaluation(
    log: RunLog, reference: CheckpointReference, plan: EvaluationPlan, *, during_attempt: int | None = None
) -> str | None:
    """Hold the checkpoint until this evaluation is on record; returns the hold's id, None where nothing is committed.

    With `during_attempt` the hold also ends when a later attempt starts: who asked for it is fenced then.
    """
    suite_sha256, holder = plan.suite.sha256, this_placement(device=plan.device, threads=plan.threads)
    asked = (reference.prefix, suite_sha256, during_attempt, holder)
    for held in log.refresh().holds:
        if (held.prefix, held.suite_sha256, held.during_attempt, held.holder) == asked:
            return held.hold_id
    hold = new_hold(reference, holder, suite_sha256=suite_sha256, during_attempt=during_attempt)
    return hold.hold_id if hold_checkpoint(log, hold, writer=this_writer()) else None


def record_evaluation(
    log: RunLog,
    reference: CheckpointReference,
    plan: EvaluationPlan,
    *,
    during_attempt: int | None = None,
    clock: Callable[[], datetime] = utc_now,
    measure: Callable[[bytes, float], Outcome] | None = None,
) -> EvaluationRecorded | EvaluationFailed:
    """Measure the checkpoint unless that is on record, and append what came of it; never raises for the evaluator.

    An evaluator that fails is run again as often as its budget allows. Raises `CheckpointGone` where the log no longer
    calls the checkpoint committed.
    """
    known = find_evaluation(log.refresh(), reference.manifest_sha256, plan.suite.sha256)
    while known is None:
        body = _measure_once(log, reference, plan, during_attempt, clock, measure or run_evaluator)
        if isinstance(body, EvaluationRecorded) or not _may_try_again(log.refresh(), body, plan):
            return body
        known = find_evaluation(log.state, reference.manifest_sha256, plan.suite.sha256)
    return known


def _may_try_again(state: RunState, failed: EvaluationFailed, plan: EvaluationPlan) -> bool:
    names = (failed.manifest_sha256, failed.suite_sha256)
    return evaluator_retries_left(plan.budget, state.failed_evaluations, *names) > 0


def _measure_once(
    log: RunLog,
    reference: CheckpointReference,
    plan: EvaluationPlan,
    during_attempt: int | None,
    clock: Callable[[], datetime],
    measure: Callable[[bytes, float], Outcome],
) -> EvaluationRecorded | EvaluationFailed:
    hold_id = hold_for_evaluation(log, reference, plan, during_attempt=during_attempt)
    if hold_id is None:
        raise CheckpointGone(f"{reference.prefix}: is no longer committed, so it is not evaluated")
    started_at, started = clock(), time.monotonic()
    outcome = measure(_order(log, reference, plan), plan.timeout_seconds)
    body = _body(outcome, reference, plan, started_at, time.monotonic() - started)
    body = replace(body, hold_id=hold_id)
    log.append(partial(_unless_recorded, body, reference.prefix), writer=this_writer())
    return body


def _unless_recorded(
    body: EvaluationRecorded | EvaluationFailed, prefix: str, state: RunState
) -> EvaluationRecorded | EvaluationFailed | None:
    record = state.find(prefix)
    if isinstance(body, EvaluationFailed) and (record is None or record.state != COMMITTED):
        return None  # its hold had ended and the bytes went: no fault of the evaluator
    return None if body in state.evaluations or body in state.failed_evaluations else body


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
        "run_prefix": log.prefix,
        "number": 1 + len(log.state.evaluations) + len(log.state.failed_evaluations),
        "faults": plan.faults,
        "mask_documents": plan.mask_documents,
    }
    return msgspec.json.encode(order)


def run_evaluator(order: bytes, timeout_seconds: float) -> Outcome:
    """Run the evaluator process on an order; whatever it does comes back as an outcome."""
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
        return Outcome(result=b"", problem=f"the evaluator did not answer within {timeout_seconds:g} s")
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing on stderr"]
        return Outcome(result=b"", problem=f"the evaluator exited with {done.returncode}: {tail[0]}")
    return Outcome(result=done.stdout, problem="")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Printed:
    metrics: dict[str, float]
    samples: tuple[str, ...]


def _body(
    outcome: Outcome, reference: CheckpointReference, plan: EvaluationPlan, started_at: datetime, seconds: float
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
