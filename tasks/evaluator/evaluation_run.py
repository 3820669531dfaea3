"""Evaluates one committed checkpoint under one suite and records the outcome, equal ones once. Imports no torch.

Its verdict on the run's loss curve up to that step is the same whenever it is computed.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cairn.model.configuration import network, training
from cairn.storage.checkpoints.resume_point import new_pin, pin_checkpoint, unpin_entry
from cairn.storage.errors import StorageError
from cairn.storage.logs import log_entry, run_entries, run_log, run_state, window_losses
from cairn.storage.logs.run_entries import EvaluationRecorded
from cairn.storage.stores.child_process import temporary_folder
from cairn.storage.stores.codec import encode, sha256
from cairn.tasks.attempt.injected_faults import evaluator_fault
from cairn.tasks.configuration import settings
from cairn.tasks.errors import CheckpointGone
from cairn.tasks.evaluator import curve_reader, evaluator_process
from cairn.tasks.machine.placement import this_placement
from cairn.tasks.policy import budgets, curve_verdict, failures

Recorded = EvaluationRecorded | run_entries.EvaluationFailed
Clock = Callable[[], datetime]
Measure = Callable[[bytes, float], evaluator_process.Outcome]
_POLL_SECONDS = 0.5
COMMANDS, ALLOWED, LOGGED = "CAIRN_EVALUATOR_COMMANDS", "allow", "log"
"""`allow`, the default, runs commands of this machine's configurations; `log` runs those of logs too; others none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A fixed slice of held-out windows and fixed prompts with a fixed seed."""

    name: str
    batches: int
    batch_size: int
    prompts: tuple[str, ...]
    sample_tokens: int
    sample_seed: int
    evaluator_version: str = "2"

    @property
    def sha256(self) -> str:
        """The suite's identity."""
        return sha256(encode(self))


AnySuite = Suite | settings.EvaluatorConfig
"""A slice of held-out windows with prompts, or a command."""


def suite_of(evaluation: settings.EvaluationConfig) -> Suite:
    """Return the held-out suite of a run's evaluation section, by which its checkpoints are compared."""
    own = {"name", "batches", "batch_size", "prompts", "sample_tokens", "sample_seed"}
    return Suite(**evaluation.model_dump(include=own))


def required_suites_of(evaluation: settings.EvaluationConfig) -> tuple[AnySuite, ...]:
    """Return the suites that must have measured a checkpoint before it may be promoted."""
    return (suite_of(evaluation), *(suite for suite in evaluation.evaluators if suite.required))


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlan:
    """How checkpoints are measured under one suite; further suites have plans, failures and retries of their own."""

    suite: AnySuite
    model: network.ModelConfig
    snapshot_id: str
    cache_dir: Path
    device: str
    threads: int
    timeout_seconds: float
    budget: settings.BudgetConfig = field(default_factory=lambda: settings.BudgetConfig(retries=0))
    faults: str = ""
    mask_documents: bool = False
    arithmetic: training.Arithmetic = "native"
    allowed_code: tuple[str, ...] = ()
    following: tuple["EvaluationPlan", ...] = ()

    @property
    def all(self) -> tuple["EvaluationPlan", ...]:
        """This plan and those that follow it, in order."""
        return (self, *self.following)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One checkpoint and the suite it is measured under.

    `again` measures once more even if there is a record. If the evaluator's budget was spent before, it runs only
    `on_request`. A `reader` that read the run's curve before reads only what is new; `note` gets the share of the
    windows that are measured.
    """

    reference: log_entry.CheckpointReference
    plan: EvaluationPlan
    during_attempt: int | None = None
    again: bool = False
    on_request: bool = False
    reader: curve_reader.CurveReader | None = None
    note: Callable[[float], object] = lambda share: None

    def __str__(self) -> str:
        """Return the step; only a command's suite is named, since every checkpoint has the held-out one."""
        suite, step = self.plan.suite, self.reference.step
        return f"{step}, {suite.name}" if isinstance(suite, settings.EvaluatorConfig) else f"{step}"

    def known(self, state: run_state.RunState) -> EvaluationRecorded | None:
        """Return its record, or None before there is one, or to measure again."""
        wanted = (self.reference.manifest_sha256, self.plan.suite.sha256, self.plan.snapshot_id)
        return None if self.again else find_evaluation(state, *wanted)

    def failed(self, state: run_state.RunState) -> list[run_entries.EvaluationFailed]:
        """Return its failures, without refusals."""
        known = state.failed_evaluations_of(self.reference.manifest_sha256)
        return [item for item in known if item.suite_sha256 == self.plan.suite.sha256 and not item.refused]

    def may_retry(self, state: run_state.RunState) -> bool:
        """Whether the budget has room for another failure of it."""
        charged = [item for item in state.failed_evaluations if not item.refused]
        return len(self.failed(state)) <= budgets.evaluator_budget(self.plan.budget, charged).retries


class EvaluationSpec(network.Section):
    """The spec of one evaluation: `number` counts the run's evaluations, `folder` holds a command's model and files.

    `source_sha256` names the source of the weights that the run began with.
    """

    plan: EvaluationPlan
    checkpoint: log_entry.CheckpointReference
    store_url: str
    run_id: str
    number: int
    folder: Path | None
    source_sha256: str | None = None


def find_evaluation(
    state: run_state.RunState, manifest_sha256: str, suite_sha256: str, data_snapshot: str | None = None
) -> EvaluationRecorded | None:
    """Return the newest evaluation of these weights under this suite, on any snapshot if none is named, or None."""
    known = reversed(state.evaluations_of(manifest_sha256))
    found = (item for item in known if item.suite_sha256 == suite_sha256)
    return next((item for item in found if data_snapshot in (None, item.data_snapshot)), None)


def pin_for_evaluation(
    log: run_log.RunLog, reference: log_entry.CheckpointReference, plan: EvaluationPlan, *, during_attempt: int | None
) -> str | None:
    """Pin the checkpoint until this evaluation is recorded; returns the pin's id, or None if it is not committed.

    With `during_attempt` the pin also ends when a later attempt starts, which fences that attempt; and a pin from the
    commit is taken over, because an attempt evaluates a checkpoint under a suite only once at a time.
    """
    suite_sha256, pinned_by = plan.suite.sha256, this_placement(device=plan.device, threads=plan.threads)
    wanted = (reference.prefix, suite_sha256, during_attempt, pinned_by)
    for pin in log.refresh().pins if during_attempt is not None else ():
        if (pin.prefix, pin.suite_sha256, pin.during_attempt, pin.pinned_by) == wanted:
            return pin.pin_id
    pin = new_pin(reference, pinned_by, suite_sha256=suite_sha256, during_attempt=during_attempt)
    return pin.pin_id if pin_checkpoint(log, pin, writer=log_entry.this_writer()) else None


def record_evaluation(
    log: run_log.RunLog,
    asked: Measurement,
    *,
    stopping: Callable[[], bool] = lambda: False,
    clock: Clock = log_entry.utc_now,
    monotonic: Callable[[], float] = time.monotonic,
    measure: Measure | None = None,
) -> Recorded:
    """Return the recorded evaluation, measuring the checkpoint if there is none; a failed evaluator does not raise.

    A failed evaluator is retried within its budget, after its back-off; if the budget was spent before and nobody
    requests it, its last failure is returned. Raises `CheckpointGone` if the checkpoint is no longer committed, and
    `EvaluationInterrupted`, with nothing recorded, once `stopping` returns True. A command that this machine refuses is
    not run and recorded as failed.
    """
    measure = measure or partial(evaluator_process.run_evaluator, stopping=stopping, note=asked.note)
    log.refresh()
    while (known := asked.known(log.state)) is None:
        if not asked.on_request and (failed := asked.failed(log.state)) and not asked.may_retry(log.state):
            return failed[-1]
        body = _measure_once(log, asked, measure, clock, monotonic)
        if isinstance(body, EvaluationRecorded) or body.refused or not asked.may_retry(log.refresh()):
            return body
        delay = budgets.backoff_seconds(asked.plan.budget, len(asked.failed(log.state)) - 1)
        while delay > 0 and not stopping():
            time.sleep(min(delay, _POLL_SECONDS))
            delay -= _POLL_SECONDS
    return known


def _measure_once(
    log: run_log.RunLog, asked: Measurement, measure: Measure, clock: Clock, monotonic: Callable[[], float]
) -> Recorded:
    reference, plan = asked.reference, asked.plan
    pin_id = pin_for_evaluation(log, reference, plan, during_attempt=asked.during_attempt)
    if pin_id is None:
        raise CheckpointGone(f"{reference.prefix}: is no longer committed, so it is not evaluated")
    started_at, started = clock(), monotonic()
    parent = plan.cache_dir.parent / "evaluations"
    number = 1 + len(log.state.evaluations) + len(log.state.failed_evaluations)
    if is_command := isinstance(plan.suite, settings.EvaluatorConfig):
        parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder("evaluation-", parent) if is_command else nullcontext() as folder:
        spec = EvaluationSpec(
            plan=replace(plan, following=()),
            checkpoint=reference,
            store_url=log.store.url,
            run_id=log.run_id,
            number=number,
            folder=folder,
            source_sha256=log.state.opened.initial_source_sha256 if log.state.opened else None,
        )
        if refusal := refuse_command(plan.suite, os.environ):
            outcome = evaluator_process.Outcome(result=b"", problem=refusal, refused=True)
        else:
            outcome = measure(spec.model_dump_json().encode(), plan.timeout_seconds)
    if outcome.problem and (fault := evaluator_fault(log.store, log.prefix, plan.faults, number)):
        outcome = replace(outcome, problem=failures.as_injected(outcome.problem, fault))
    body = _body(log, outcome, asked, started_at=started_at, seconds=monotonic() - started, pin_id=pin_id)
    if isinstance(body, EvaluationRecorded):
        body = with_verdict(log, body, asked.reader or curve_reader.CurveReader(log.store, log.prefix))
    state = log.append(partial(_unless_recorded, body, asked), writer=log_entry.this_writer())
    return (asked.known(state) or body) if isinstance(body, EvaluationRecorded) else body


def _body(log: run_log.RunLog, outcome: evaluator_process.Outcome, asked: Measurement, **common: Any) -> Recorded:
    reference, plan = asked.reference, asked.plan
    common |= {"step": reference.step, "manifest_sha256": reference.manifest_sha256, "data_snapshot": plan.snapshot_id}
    common |= {"suite": plan.suite.name, "suite_sha256": plan.suite.sha256}
    if outcome.problem:
        return run_entries.EvaluationFailed(detail=outcome.problem, refused=outcome.refused, **common)
    try:
        result = msgspec.json.decode(outcome.result, type=evaluator_process.EvaluationResult)
    except (msgspec.DecodeError, RecursionError) as error:
        return run_entries.EvaluationFailed(detail=f"the evaluator printed nonsense: {error}", **common)
    written = None
    if result.losses:
        found = window_losses.WindowLosses(window_tokens=result.window_tokens, losses=result.losses)
        written = window_losses.write_losses(log.store, log.prefix, found)
    common |= {"evaluator_version": plan.suite.evaluator_version, "window_losses_sha256": written}
    return EvaluationRecorded(metrics=result.metrics, samples=result.samples, boundary=result.boundary, **common)


def _unless_recorded(
    body: Recorded, asked: Measurement, state: run_state.RunState
) -> Recorded | run_entries.CheckpointUnpinned | None:
    record, manifest_sha256 = state.find_live(asked.reference.prefix), asked.reference.manifest_sha256
    if isinstance(body, run_entries.EvaluationFailed) and (record is None or not record.is_committed):
        return None  # its pin had ended and the bytes were deleted, so the evaluator is not at fault
    if body in (*state.evaluations_of(manifest_sha256), *state.failed_evaluations_of(manifest_sha256)):
        return None
    if isinstance(body, EvaluationRecorded) and asked.known(state) is not None:
        pin = next((pin for pin in state.pins if pin.pin_id == body.pin_id), None)
        return unpin_entry(pin, "another evaluator was sooner: one outcome is enough", state) if pin else None
    return body


def with_verdict(log: run_log.RunLog, body: EvaluationRecorded, reader: curve_reader.CurveReader) -> EvaluationRecorded:
    """Return the evaluation with the verdict on the curve up to its step, if it has a held-out loss to judge."""
    with suppress(StorageError, ValueError, LookupError, ArithmeticError):
        loss = body.metrics[settings.METRIC]
        curve = reader.read(log.state, suite_sha256=body.suite_sha256, until_step=body.step)
        val = [point for point in curve.val if point[0] != body.step]
        return replace(body, verdict=curve_verdict.judge(replace(curve, val=(*val, (body.step, loss)))))
    return body


def refuse_command(suite: AnySuite, environment: Mapping[str, str]) -> str:
    """Return why this machine does not run the suite's command; empty if it does, or if the suite has none."""
    allowed = environment.get(COMMANDS, ALLOWED)
    if isinstance(suite, Suite) or allowed == LOGGED or (allowed == ALLOWED and not suite.logged):
        return ""
    if allowed != ALLOWED:
        return f"evaluator {suite.name}: this machine runs no evaluator's command ({COMMANDS} is not `{ALLOWED}`)"
    remedy = f"in this machine's configuration or with --suite, or set {COMMANDS}={LOGGED} to run the commands of logs"
    return f"evaluator {suite.name}: only the run's log names its command, so it was not run; name it {remedy}"
