"""Evaluate one committed checkpoint under one suite, and put the outcome on record.

Owns the evaluator process from outside, and re-use: equal manifest, suite and data are measured once. Refuses torch:
the weights are the child's business.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from storage.checkpoints.checkpoint_pin import new_pin, pin_checkpoint, unpin_entry
from storage.logs.entry_log import this_writer, utc_now
from storage.logs.log_entry import CheckpointReference
from storage.logs.run_entries import CheckpointUnpinned, EvaluationFailed, EvaluationRecorded
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from tasks.configuration.settings import BudgetConfig
from tasks.errors import CheckpointGone
from tasks.evaluator.evaluation_folder import evaluation_folder
from tasks.evaluator.evaluation_suite import AnySuite, CommandSuite
from tasks.evaluator.evaluator_process import Outcome, never, run_evaluator
from tasks.evaluator.run_curve import with_verdict
from tasks.machine.placement import this_placement
from tasks.policy.budgets import evaluator_retries_left

if TYPE_CHECKING:
    from model.configuration.network import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlan:
    """How a run's checkpoints are measured under one suite, and the plans whose turn comes after it.

    Every suite has a plan of its own, so that its failures, retries, re-use and record are its own.
    """

    suite: AnySuite
    model: "ModelConfig"
    snapshot_id: str
    cache_dir: Path
    device: str
    threads: int
    timeout_seconds: float
    budget: BudgetConfig = field(default_factory=lambda: BudgetConfig(retries=0))
    faults: str = ""
    mask_documents: bool = False
    following: tuple["EvaluationPlan", ...] = ()

    @property
    def all(self) -> tuple["EvaluationPlan", ...]:
        """This plan and those that follow it, in order."""
        return (self, *self.following)


def find_evaluation(
    state: RunState, manifest_sha256: str, suite_sha256: str, data_snapshot: str | None = None
) -> EvaluationRecorded | None:
    """Return the evaluation of exactly these weights under exactly this suite, newest first, or None.

    Without a `data_snapshot` it is the run's own: no run has two.
    """
    for item in reversed(state.evaluations):
        if (item.manifest_sha256, item.suite_sha256) != (manifest_sha256, suite_sha256):
            continue
        if data_snapshot in (None, item.data_snapshot):
            return item
    return None


def pin_for_evaluation(
    log: RunLog, reference: CheckpointReference, plan: EvaluationPlan, *, during_attempt: int | None = None
) -> str | None:
    """Hold the checkpoint until this evaluation is on record; returns the hold's id, None where nothing is committed.

    With `during_attempt` the hold also ends when a later attempt starts: who asked for it is fenced then.
    """
    suite_sha256, holder = plan.suite.sha256, this_placement(device=plan.device, threads=plan.threads)
    asked = (reference.prefix, suite_sha256, during_attempt, holder)
    for held in log.refresh().pins:
        if (held.prefix, held.suite_sha256, held.during_attempt, held.holder) == asked:
            return held.hold_id
    hold = new_pin(reference, holder, suite_sha256=suite_sha256, during_attempt=during_attempt)
    return hold.hold_id if pin_checkpoint(log, hold, writer=this_writer()) else None


def record_evaluation(
    log: RunLog,
    reference: CheckpointReference,
    plan: EvaluationPlan,
    *,
    during_attempt: int | None = None,
    again: bool = False,
    asked: bool = True,
    stopping: Callable[[], bool] = never,
    clock: Callable[[], datetime] = utc_now,
    measure: Callable[[bytes, float], Outcome] | None = None,
) -> EvaluationRecorded | EvaluationFailed:
    """Measure the checkpoint unless that is on record, and append what came of it; never raises for the evaluator.

    `again` measures what is on record once more. An evaluator that fails is run again as often as its budget allows;
    where that is spent already, it is run if somebody `asked`, else its last failure is returned.
    Raises `CheckpointGone` where the log no longer calls the checkpoint committed, `EvaluationInterrupted` with nothing
    on record once `stopping` says so.
    """
    measure = measure or partial(run_evaluator, stopping=stopping)
    trial = _Trial(log=log, reference=reference, plan=plan, during_attempt=during_attempt, again=again, clock=clock)
    log.refresh()
    while (known := trial.known(log.state)) is None:
        if not asked and (spent := trial.spent(log.state)) is not None:
            return spent
        body = _measure_once(trial, measure)
        if isinstance(body, EvaluationRecorded) or not _may_try_again(log.refresh(), body, plan):
            return body
    return known


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    log: RunLog
    reference: CheckpointReference
    plan: EvaluationPlan
    during_attempt: int | None
    again: bool
    clock: Callable[[], datetime]

    def known(self, state: RunState) -> EvaluationRecorded | None:
        """Return what is on record and makes measuring needless."""
        if self.again:
            return None
        plan = self.plan
        return find_evaluation(state, self.reference.manifest_sha256, plan.suite.sha256, plan.snapshot_id)

    def spent(self, state: RunState) -> EvaluationFailed | None:
        """Return the last failure where the evaluator's budget is spent on these weights."""
        names = (self.reference.manifest_sha256, self.plan.suite.sha256)
        failed = [item for item in state.failed_evaluations if (item.manifest_sha256, item.suite_sha256) == names]
        return failed[-1] if failed and not _may_try_again(state, failed[-1], self.plan) else None


def _may_try_again(state: RunState, failed: EvaluationFailed, plan: EvaluationPlan) -> bool:
    names = (failed.manifest_sha256, failed.suite_sha256)
    return evaluator_retries_left(plan.budget, state.failed_evaluations, *names) > 0


def _measure_once(trial: _Trial, measure: Callable[[bytes, float], Outcome]) -> EvaluationRecorded | EvaluationFailed:
    log, reference, plan = trial.log, trial.reference, trial.plan
    hold_id = pin_for_evaluation(log, reference, plan, during_attempt=trial.during_attempt)
    if hold_id is None:
        raise CheckpointGone(f"{reference.prefix}: is no longer committed, so it is not evaluated")
    started_at, started = trial.clock(), time.monotonic()
    outcome = _measured(log, reference, plan, measure)
    body = _body(outcome, reference, plan, started_at, time.monotonic() - started)
    body = replace(body, hold_id=hold_id)
    if isinstance(body, EvaluationRecorded):
        body = with_verdict(log, body)
    state = log.append(partial(_unless_recorded, body, trial), writer=this_writer())
    return (trial.known(state) or body) if isinstance(body, EvaluationRecorded) else body


def _measured(
    log: RunLog, reference: CheckpointReference, plan: EvaluationPlan, measure: Callable[[bytes, float], Outcome]
) -> Outcome:
    if not isinstance(plan.suite, CommandSuite):
        return measure(_order(log, reference, plan, folder=None), plan.timeout_seconds)
    with evaluation_folder(plan.cache_dir.parent / "evaluations") as folder:
        return measure(_order(log, reference, plan, folder=folder), plan.timeout_seconds)


def _unless_recorded(
    body: EvaluationRecorded | EvaluationFailed, trial: _Trial, state: RunState
) -> EvaluationRecorded | EvaluationFailed | CheckpointUnpinned | None:
    record = state.find(trial.reference.prefix)
    if isinstance(body, EvaluationFailed) and (record is None or not record.is_committed):
        return None  # its hold had ended and the bytes went: no fault of the evaluator
    if body in state.evaluations or body in state.failed_evaluations:
        return None
    if isinstance(body, EvaluationRecorded) and trial.known(state) is not None:
        held = next((hold for hold in state.pins if hold.hold_id == body.hold_id), None)
        return unpin_entry(held, "another evaluator was sooner: one outcome is enough", state) if held else None
    return body


def _order(log: RunLog, reference: CheckpointReference, plan: EvaluationPlan, *, folder: Path | None) -> bytes:
    order = {
        "store_url": log.store.url,
        "snapshot_id": plan.snapshot_id,
        "model": plan.model.model_dump(mode="json"),
        "checkpoint": reference,
        "suite": plan.suite,
        "cache_dir": str(plan.cache_dir),
        "device": plan.device,
        "threads": plan.threads,
        "folder": str(folder) if folder else None,
        "run_id": log.run_id,
        "run_prefix": log.prefix,
        "number": 1 + len(log.state.evaluations) + len(log.state.failed_evaluations),
        "faults": plan.faults,
        "mask_documents": plan.mask_documents,
    }
    return msgspec.json.encode(order)


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
        except (msgspec.DecodeError, RecursionError) as error:
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
