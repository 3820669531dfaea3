"""The fold from a run's entries to its state. Pure.

An entry of an attempt after its own end or a later attempt's start has no effect: fencing on the reader's side.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import reduce
from typing import Any

from storage.logs.log_entry import Entry, newer_entry
from storage.logs.run_entries import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointRestored,
    CheckpointSuperseded,
    CheckpointUnpinned,
    DataQuarantined,
    EvaluationFailed,
    EvaluationRecorded,
    RunDeleted,
    RunFinished,
    RunOpened,
)
from storage.logs.run_state import AttemptRecord, Charges, CheckpointRecord, CheckpointState, RefusedEntry, RunState


def fold(entries: Iterable[Entry], state: RunState | None = None) -> RunState:
    """Return the state after `entries`, starting from `state` or from an empty run."""
    return reduce(_apply, entries, state or RunState())


def _apply(state: RunState, entry: Entry) -> RunState:
    body, owner = entry.body, state.open_attempt
    if isinstance(body, dict):
        return state if state.newer else replace(state, newer=newer_entry(entry))
    if isinstance(body, AttemptStarted):
        if body.attempt != state.latest_attempt + 1 or owner is not None or state.deleted is not None:
            return _refuse(state, entry)
        started = AttemptRecord(started=body, started_at=entry.at)
        pins = tuple(pin for pin in state.pins if pin.during_attempt is None)
        return replace(state, attempts=state.attempts.append(started), pins=pins)
    if state.fences(entry.writer.attempt):
        return _refuse(state, entry)
    match body:
        case RunOpened() if state.opened is None:
            return replace(state, opened=body, opened_at=entry.at)
        case AttemptEnded():
            if owner is None or owner.started.attempt != body.attempt:
                return _refuse(state, entry)
            return end_attempt(state, body, entry.at)
        case RunFinished():
            return replace(state, finished=body)
        case RunDeleted():
            return _delete(state, entry, body)
        case DataQuarantined():
            return replace(state, quarantines=(*state.quarantines, body))
        case EvaluationRecorded() | EvaluationFailed():
            return _evaluate(state, body)
        case _:
            return _apply_checkpoint_entry(state, entry)


def _apply_checkpoint_entry(state: RunState, entry: Entry) -> RunState:
    match body := entry.body:
        case CheckpointCommitted():
            return _commit(state, entry, body)
        case CheckpointQuarantined() | CheckpointRestored() | CheckpointSuperseded() | CheckpointDeleted():
            return _move_checkpoint(state, entry, body)
        case CheckpointPinned():
            record = state.find_live(body.prefix)
            late = body.during_attempt is not None and body.during_attempt != state.latest_attempt
            committed = record.committed.manifest_sha256 if record is not None and record.is_committed else None
            if late or committed != body.manifest_sha256:
                return _refuse(state, entry)
            return replace(state, pins=(*state.pins, body))
        case CheckpointUnpinned():
            return replace(state, pins=_without_pin(state.pins, body.hold_id))
        case _:
            return state


def _delete(state: RunState, entry: Entry, body: RunDeleted) -> RunState:
    if state.opened is None or state.deleted is not None or state.open_attempt is not None or state.binding_pins:
        return _refuse(state, entry)
    why = f"the run was deleted by {body.by}"
    live = tuple(
        replace(record, state=CheckpointState.SUPERSEDED, detail=why) if record.is_kept else record
        for record in state.live_checkpoints
    )
    return replace(state, deleted=body, deleted_at=entry.at, live_checkpoints=live, pins=())


def _refuse(state: RunState, entry: Entry) -> RunState:
    refused = RefusedEntry(seq=entry.seq, kind=entry.kind, attempt=entry.writer.attempt)
    return replace(state, refused=state.refused.append(refused))


def end_attempt(state: RunState, ended: AttemptEnded, at: datetime) -> RunState:
    """Return the state after the end of its newest attempt, with what was charged and decided."""
    record, decision, charges = replace(state.attempts[-1], ended=ended, ended_at=at), ended.decision, state.charges
    if reason := decision.charged:
        spent = charges.get(reason, Charges())
        spent = Charges(
            since_progress=(*spent.since_progress, ended.attempt),
            total=spent.total + 1,
            wasted_gpu_seconds=spent.wasted_gpu_seconds + ended.wasted_gpu_seconds,
        )
        charges = {**charges, reason: spent}
    sizes = [size for size in (state.smallest_micro_batch, decision.micro_batch) if size]
    return replace(
        state,
        attempts=state.attempts.replace_last(record),
        charges=charges,
        smallest_micro_batch=min(sizes, default=None),
        recomputes_activations=state.recomputes_activations or bool(decision.activation_checkpointing),
    )


def refill(charges: Mapping[str, Charges]) -> Mapping[str, Charges]:
    """Return the charges after progress: no retries are counted any more."""
    return {reason: replace(spent, since_progress=()) for reason, spent in charges.items()}


def _evaluate(state: RunState, body: EvaluationRecorded | EvaluationFailed) -> RunState:
    name = "evaluations" if isinstance(body, EvaluationRecorded) else "failed_evaluations"
    live = list(state.live_checkpoints)
    for place, record in enumerate(live):
        if record.committed.manifest_sha256 == body.manifest_sha256:
            outcomes: dict[str, Any] = {name: (*getattr(record, name), body)}
            live[place] = replace(record, **outcomes)
    history: dict[str, Any] = {name: getattr(state, name).append(body)}
    return replace(state, live_checkpoints=tuple(live), pins=_without_pin(state.pins, body.hold_id), **history)


def _commit(state: RunState, entry: Entry, body: CheckpointCommitted) -> RunState:
    if body.attempt != entry.writer.attempt or state.find_commit(body) is not None:
        return _refuse(state, entry)
    progress = body.step > state.high_water_step
    owner = state.attempts[-1]
    owner = replace(
        owner,
        last_committed_step=body.step,
        made_progress=owner.made_progress or progress,
        committed_tokens=max(owner.committed_tokens, body.tokens),
        committed_gpu_seconds=max(owner.committed_gpu_seconds, body.gpu_seconds),
    )
    record = CheckpointRecord(committed=body, committed_at=entry.at, number=state.commits)
    return replace(
        state,
        attempts=state.attempts.replace_last(owner),
        live_checkpoints=(*state.live_checkpoints, record),
        high_water_step=max(state.high_water_step, body.step),
        charges=refill(state.charges) if progress else state.charges,
    )


def _without_pin(pins: tuple[CheckpointPinned, ...], hold_id: str | None) -> tuple[CheckpointPinned, ...]:
    return tuple(pin for pin in pins if pin.hold_id != hold_id)


def _move_checkpoint(
    state: RunState,
    entry: Entry,
    body: CheckpointQuarantined | CheckpointRestored | CheckpointSuperseded | CheckpointDeleted,
) -> RunState:
    record = state.find_live(body.prefix)
    if record is None or record.committed.manifest_sha256 != body.manifest_sha256:
        return _refuse(state, entry)
    match body:
        case CheckpointQuarantined() if record.is_committed:
            detail = body.detail or record.detail
            moved = replace(record, state=CheckpointState.QUARANTINED, detail=detail, evidence=body.evidence)
        case CheckpointRestored() if record.may_be_restored:
            moved = replace(record, state=CheckpointState.COMMITTED, detail=body.detail)
        case CheckpointSuperseded() if record.is_kept and not state.is_needed(body.prefix):
            moved = replace(record, state=CheckpointState.SUPERSEDED, detail=body.why or record.detail)
        case CheckpointDeleted() if record.state == CheckpointState.SUPERSEDED:
            gone = replace(record, state=CheckpointState.DELETED, evaluations=(), failed_evaluations=())
            live = tuple(other for other in state.live_checkpoints if other is not record)
            return replace(state, live_checkpoints=live, deleted_checkpoints=state.deleted_checkpoints.append(gone))
        case _:
            return _refuse(state, entry)
    live = tuple(moved if other is record else other for other in state.live_checkpoints)
    return replace(state, live_checkpoints=live)
