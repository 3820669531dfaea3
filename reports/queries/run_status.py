"""The state of a run, its owner, what its budgets have left, and what happens next. Reads the log and the heartbeat."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from cairn.reports.queries.run_lookup import configuration_document, read_beat, tokens_per_step
from cairn.storage.errors import IntegrityError
from cairn.storage.logs import run_entries, run_index, run_log, run_note, run_state, step_log
from cairn.storage.stores import codec, object_store
from cairn.tasks.configuration.addresses import name_store
from cairn.tasks.machine.arithmetic import arithmetic_before, describe_move
from cairn.tasks.policy.termination import RESTARTABLE, DecisionAction, TerminationReason

_MOST_NOTES = 20
_RESUMABLE = {*RESTARTABLE, TerminationReason.FENCED}


class RunPhase(StrEnum):
    """Where a run stands.

    `paused`: by its set or cost.limit; `unreadable`: its log does not verify; `deleting`: closed, not yet all deleted.
    """

    OPENED = "opened"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
    PAUSED = "paused"
    STOPPED = "stopped"
    DELETING = "deleting"
    DELETED = "deleted"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limit:
    retries: int = 0
    total: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetStatus:
    """A budget: spent and left since the last progress, and in total where that is limited."""

    spent: int
    left: int
    spent_total: int
    left_total: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One run at a glance; an evaluation is outstanding while it pins its checkpoint.

    Speed, and the seconds that the steps left take at it, are of a run that trains; of notes the newest 20, oldest
    first.
    """

    run_id: str
    state: str
    step: int
    total_steps: int
    newest_committed_step: int | None
    owner: run_entries.Placement | None
    budgets: Mapping[str, BudgetStatus]
    next: str
    stopped_early: str | None = None
    quarantined_windows: int = 0
    bits: str = ""
    injected: str = ""
    symptom: str = ""
    forked_from: str | None = None
    evaluations_outstanding: int = 0
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    tags: tuple[str, ...] = ()
    notes: tuple[run_note.RunNote, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run of a list. `detail` says why a run is unreadable, stopped early, or needs a person's decision."""

    run_id: str
    state: str
    model_family: str | None = None
    step: int | None = None
    total_steps: int | None = None
    newest_committed_step: int | None = None
    attempts: int | None = None
    opened_at: datetime | None = None
    detail: str | None = None
    tags: tuple[str, ...] = ()


def read_status(log: run_log.RunLog) -> RunStatus:
    """Return the status of a run that was read."""
    owner = log.state.open_attempt.started if log.state.open_attempt else None
    last = step_log.read_last_record(log.store, log.prefix, owner.attempt, owner.claim_id) if owner else None
    return make_status(log, read_beat(log), last)


def make_status(
    log: run_log.RunLog, beat: step_log.Heartbeat | None, last: step_log.StepRecord | None = None
) -> RunStatus:
    """Return the status of a run that was read, with the heartbeat and the last step of its open attempt."""
    state, standing = log.state, phase_of(log.state)
    speed = last.tokens_per_second if last and standing == RunPhase.RUNNING else None
    total, step = state.opened.total_steps if state.opened else 0, max(state.reached_step, beat.step if beat else 0)
    owner, beat = (state.open_attempt, beat) if standing == RunPhase.RUNNING else (None, None)
    limits = configuration_document(state).get("budgets")
    if not limits:
        from cairn.tasks.configuration.settings import BudgetsConfig  # pydantic: only without an attempt

        limits = BudgetsConfig().model_dump(mode="json")
    newest, injected = state.attempts[-1] if state.attempts else None, ""
    if newest is not None and newest.started.faults:  # it, or the last one that ended, may have met them
        ended = next((record.ended for record in reversed(state.attempts[-2:]) if record.ended), None)
        met = f"; {', '.join(ended.injected)} ended attempt {ended.attempt}" if ended and ended.injected else ""
        injected = f"CAIRN_FAULTS is set to {newest.started.faults} for attempt {newest.started.attempt}{met}"
    if not isinstance(limits, Mapping):
        raise IntegrityError("the run's log: budgets of the newest attempt are no table; the log was changed")
    return RunStatus(
        run_id=log.run_id,
        state=standing,
        step=step,
        total_steps=total,
        newest_committed_step=state.newest_committed.committed.step if state.newest_committed else None,
        owner=owner.started.placement if owner else None,
        budgets=count_budgets(state, limits),
        next=name_store(_next(log.run_id, state, standing), log.store.url, os.environ),
        stopped_early=stopped_early(state),
        quarantined_windows=len(state.quarantined_windows),
        bits=bits_differ(state, beat),
        injected=injected,
        symptom=beat.symptom if beat else "",
        forked_from=f"{state.origin.run_id}@{state.origin.checkpoint.step}" if state.origin else None,
        evaluations_outstanding=sum(pin.suite_sha256 is not None for pin in state.pins),
        tokens_per_second=speed,
        seconds_left=(total - step) * tokens_per_step(state) / speed if speed else None,
        tags=state.tags,
        notes=state.notes[-_MOST_NOTES:],
    )


def bits_differ(state: run_state.RunState, beat: step_log.Heartbeat | None = None) -> str:
    """Return why the run's bits are not, or may not be, those of an undisturbed one; empty where they are."""
    size, why = state.smallest_micro_batch, list[str]()
    if size is not None:
        why.append(f"differ since an out-of-memory death halved the micro-batch to {size}")
    for record in state.attempts:
        now = record.ended or beat
        if now is not None and describe_move(arithmetic_before(state, record.started.resumed_from), now.arithmetic):
            number, first = record.started.attempt, record.started.first_step
            why.append(f"may differ from step {first} on: attempt {number} computed with another arithmetic")
    return "; ".join(why)


def list_runs(store: object_store.ObjectStore) -> tuple[RunSummary, ...]:
    """Return one summary for each run of the store, also for a run whose log does not verify."""

    def summarize(log: run_log.RunLog) -> RunSummary:
        standing = phase_of(log.state)
        beat = read_beat(log) if standing == RunPhase.RUNNING else None
        summary = summarize_run(log.run_id, log.state, standing, beat)
        return replace(summary, detail=name_store(summary.detail or "", store.url, os.environ) or None)

    def unreadable(run_id: str, why: str) -> RunSummary:
        return RunSummary(run_id=run_id, state=RunPhase.UNREADABLE, detail=why)

    return tuple(summary for _, summary in run_index.RunIndex(store).read_all(summarize, unreadable))


def summarize_run(
    run_id: str, state: run_state.RunState, standing: RunPhase, beat: step_log.Heartbeat | None = None
) -> RunSummary:
    """Return the summary of a run; `standing` is its state, because the log does not say whether an owner is gone."""
    newest, ended = state.newest_committed, state.attempts[-1].ended if state.attempts else None
    detail = stopped_early(state)
    if standing == RunPhase.STOPPED and ended is not None:
        detail = f"attempt {ended.attempt} ended: {ended.reason}; `cairn explain {run_id}` says why"
    elif standing == RunPhase.DELETING:
        detail = _next(run_id, state, standing)
    elif state.deleted is not None:
        detail = state.deleted.why or f"by {state.deleted.by}"
    return RunSummary(
        run_id=run_id,
        state=standing,
        model_family=state.opened.model_family if state.opened else None,
        step=max(state.reached_step, beat.step if beat else 0),
        total_steps=state.opened.total_steps if state.opened else None,
        newest_committed_step=newest.committed.step if newest else None,
        attempts=state.latest_attempt,
        opened_at=state.opened_at,
        detail=detail,
        tags=state.tags,
    )


def stopped_early(state: run_state.RunState) -> str | None:
    """Return where and why a finished run ended before its last step, None where it did not."""
    end = state.finished
    rule = end.rule if end and "." in end.rule else f"early_stop.{end.rule if end else ''}"  # a set has its own section
    return f"stopped early at step {end.step}: {end.stopped} ({rule})" if end and end.stopped else None


def phase_of(state: run_state.RunState) -> RunPhase:
    """Return the run's phase; an open attempt is interrupted where this machine knows that its owner is gone."""
    if state.deleted is not None:
        return RunPhase.DELETING if state.live_checkpoints else RunPhase.DELETED
    if not state.attempts:
        return RunPhase.OPENED
    if state.open_attempt is not None:
        from cairn.tasks.machine.placement import is_known_dead  # only an open attempt pays for it

        is_gone = is_known_dead(state.open_attempt.started.placement)
        return RunPhase.INTERRUPTED if is_gone else RunPhase.RUNNING
    if state.finished is not None:
        return RunPhase.FINISHED
    ended = state.attempts[-1].ended
    assert ended is not None
    if ended.reason == TerminationReason.PAUSED:
        return RunPhase.PAUSED
    is_resumable = ended.decision.action == DecisionAction.RESUME or ended.reason in _RESUMABLE
    return RunPhase.INTERRUPTED if is_resumable else RunPhase.STOPPED


def count_budgets(state: run_state.RunState, limits: Mapping[str, Any]) -> dict[str, BudgetStatus]:
    """Return what each budget has spent and has left under `limits`, a configuration's budgets as JSON."""
    budgets = {}
    for reason, document in sorted((name.replace("_", "-"), document) for name, document in limits.items()):
        limit = codec.convert(document, _Limit, where="the run's log: budgets of the newest attempt")
        charges = state.charges.get(reason, run_state.Charges())
        spent = len(charges.since_progress)
        left_total = None if limit.total is None else max(limit.total - charges.total, 0)
        left = min(max(limit.retries - spent, 0), limit.retries if left_total is None else left_total)
        budgets[reason] = BudgetStatus(spent=spent, left=left, spent_total=charges.total, left_total=left_total)
    return budgets


def _next(run_id: str, state: run_state.RunState, standing: RunPhase) -> str:
    again = f"`cairn train --run-id {run_id}`"
    if standing == RunPhase.DELETING:
        return f"deleting it did not come to its end: `cairn delete {run_id}` goes on"
    if standing == RunPhase.DELETED:
        return f"nothing: {state.closed_to_training()}"
    if standing == RunPhase.OPENED:
        return f"no attempt has started yet: {again} starts the first one"
    if standing == RunPhase.RUNNING:
        total = state.opened.total_steps if state.opened else 0
        return f"attempt {state.latest_attempt} trains on to step {total}; if it falls silent, {again} takes over"
    if standing == RunPhase.FINISHED:
        return f"nothing: {stopped_early(state) or 'it is finished'}; `cairn sample {run_id}` writes text with it"
    ended, last = state.attempts[-1].ended, state.attempts[-1]
    exporters, evaluation = (
        codec.stored_section(last.started.config, section) for section in ("exporters", "evaluation")
    )
    if ended is not None and last.flow_run_id and last.started.placement.continued_by.startswith("prefect deployment "):
        again = f"`prefect flow-run retry {last.flow_run_id}`"  # it has all parameters of the launch
    elif any(exporters.values()) or evaluation.get("evaluators"):  # a start from the log alone would leave them out
        again = f"`cairn train CONFIG --run-id {run_id}`, CONFIG being its configuration file,"
    why = f"attempt {state.latest_attempt} ended: {ended.reason};" if ended else "its owner's process is gone;"
    if ended is not None and standing == RunPhase.PAUSED:
        by_cost, of_set = "with a higher one", "the same command of the set continues it, alone"
        why = f"{ended.detail}; {by_cost if ended.evidence.get('too_dear') else of_set}"
    elif ended is not None and standing == RunPhase.STOPPED:
        why = f"a person decides: {ended.decision.reason}; then"
    return f"{why} {again} continues from step {state.resume_step}"
