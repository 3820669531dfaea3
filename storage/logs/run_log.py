"""The run log: the entries of one run, the pure fold to its state, and appends that decide again when a race is lost.

An entry of an attempt after its own end or a later attempt's start has no effect: fencing on the reader's side.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import reduce
from typing import Any

from cairn.storage.errors import Fenced
from cairn.storage.logs import fold_cache, log_entry, run_members, run_note, run_state
from cairn.storage.logs import run_entries as kinds
from cairn.storage.logs.run_state import Charges, CheckpointRecord, CheckpointState, RefusedEntry, RunState
from cairn.storage.stores.object_store import ObjectStore, check_key, check_name


def fold(entries: Iterable[log_entry.Entry], state: RunState | None = None) -> RunState:
    """Return the state after `entries`, starting from `state` or from an empty run."""
    return reduce(_apply, entries, state or RunState())


def _apply(state: RunState, entry: log_entry.Entry) -> RunState:
    body, owner = entry.body, state.open_attempt
    if isinstance(body, dict):
        newer = log_entry.NewerEntry(seq=entry.seq, kind=entry.kind, version=entry.version)
        return state if state.newer else replace(state, newer=newer)
    if isinstance(body, kinds.AttemptStarted):
        if body.attempt != state.latest_attempt + 1 or owner is not None or state.deleted is not None:
            return _refuse(state, entry)
        started = run_state.AttemptRecord(started=body, started_at=entry.at, flow_run_id=entry.writer.flow_run_id)
        pins = tuple(pin for pin in state.pins if pin.during_attempt is None)
        return replace(state, attempts=state.attempts.append(started), pins=pins)
    if state.fences(entry.writer.attempt):
        return _refuse(state, entry)
    if owner is not None and owner.flow_run_id is None and entry.writer.attempt and entry.writer.flow_run_id:
        shown = replace(owner, flow_run_id=entry.writer.flow_run_id)  # it began before its flow run did
        state = replace(state, attempts=state.attempts.replace_last(shown))
    if isinstance(body, kinds.CheckpointMoved):
        return _move_checkpoint(state, entry, body)
    match body:
        case kinds.RunOpened() if state.opened is None:
            return replace(state, opened=body, opened_at=entry.at)
        case kinds.AttemptEnded() | run_members.MembersChanged() if not owner or owner.started.attempt != body.attempt:
            return _refuse(state, entry)
        case kinds.AttemptEnded():
            return end_attempt(state, body, entry.at)
        case run_members.MembersChanged():
            return _change_members(state, body)
        case kinds.RunFinished():
            return replace(state, finished=body)
        case kinds.RunDeleted():
            return _delete(state, entry, body)
        case kinds.DataQuarantined():
            return replace(state, quarantines=(*state.quarantines, body))
        case kinds.EvaluationRecorded() | kinds.EvaluationFailed():
            return _evaluate(state, body)
        case kinds.CheckpointCommitted():
            return _commit(state, entry, body)
        case kinds.CheckpointPinned():
            return _pin(state, entry, body)
        case kinds.CheckpointUnpinned():
            return replace(state, pins=_without_pin(state.pins, body.pin_id))
        case kinds.ForkAbandoned():
            return replace(state, abandoned_pins=(*state.abandoned_pins, body.pin_id))
        case run_note.RunNoted():
            return _note(state, entry, body)
    return state


def _pin(state: RunState, entry: log_entry.Entry, body: kinds.CheckpointPinned) -> RunState:
    record = state.find_live(body.prefix)
    late = body.during_attempt not in (None, state.latest_attempt)
    committed = record.committed.manifest_sha256 if record is not None and record.is_committed else None
    if late or committed != body.manifest_sha256:
        return _refuse(state, entry)
    return replace(state, pins=(*state.pins, body))


def _delete(state: RunState, entry: log_entry.Entry, body: kinds.RunDeleted) -> RunState:
    if state.opened is None or state.deleted is not None or state.open_attempt is not None or state.binding_pins:
        return _refuse(state, entry)
    gone: dict[str, Any] = {"state": CheckpointState.SUPERSEDED, "detail": f"the run was deleted by {body.by}"}
    live = tuple(replace(record, **gone) if record.is_kept else record for record in state.live_checkpoints)
    return replace(state, deleted=body, deleted_at=entry.at, live_checkpoints=live, pins=())


def _note(state: RunState, entry: log_entry.Entry, body: run_note.RunNoted) -> RunState:
    note = run_note.RunNote(noted_at=entry.at, noted_by=body.by, text=body.text)
    kept = (tag for tag in state.tags if tag not in body.untagged)
    tags = tuple(dict.fromkeys((*kept, *body.tags)))[-run_note.MOST_TAGS :]
    return replace(state, tags=tags, notes=state.notes.append(note) if body.text else state.notes)


def _refuse(state: RunState, entry: log_entry.Entry) -> RunState:
    refused = RefusedEntry(seq=entry.seq, kind=entry.kind, attempt=entry.writer.attempt)
    return replace(state, refused=state.refused.append(refused))


def end_attempt(state: RunState, ended: kinds.AttemptEnded, at: datetime) -> RunState:
    """Return the state after the end of its newest attempt, with what was charged and decided."""
    record, decision = replace(state.attempts[-1], ended=ended, ended_at=at), ended.decision
    charges = charge(state.charges, decision.charged, ended.attempt, ended.wasted_gpu_seconds)
    sizes = [size for size in (state.smallest_micro_batch, decision.micro_batch) if size]
    attempts, smallest = state.attempts.replace_last(record), min(sizes, default=None)
    recomputes = state.recomputes_activations or bool(decision.activation_checkpointing)
    return replace(
        state, attempts=attempts, charges=charges, smallest_micro_batch=smallest, recomputes_activations=recomputes
    )


def _change_members(state: RunState, body: run_members.MembersChanged) -> RunState:
    charges = charge(state.charges, body.charged, body.attempt)
    return replace(state, member_changes=state.member_changes.append(body), charges=charges)


def charge(
    charges: Mapping[str, Charges], reason: str | None, attempt: int, wasted_gpu_seconds: float = 0.0
) -> Mapping[str, Charges]:
    """Return the charges with one more by an attempt, none without a reason."""
    if not reason:
        return charges
    spent = charges.get(reason, Charges())
    since, wasted = (*spent.since_progress, attempt), spent.wasted_gpu_seconds + wasted_gpu_seconds
    return {**charges, reason: Charges(since_progress=since, total=spent.total + 1, wasted_gpu_seconds=wasted)}


def refill(charges: Mapping[str, Charges]) -> Mapping[str, Charges]:
    """Return the charges after progress: no retries are counted any more."""
    return {reason: replace(spent, since_progress=()) for reason, spent in charges.items()}


def _evaluate(state: RunState, body: kinds.EvaluationRecorded | kinds.EvaluationFailed) -> RunState:
    name = "evaluations" if isinstance(body, kinds.EvaluationRecorded) else "failed_evaluations"
    live = list(state.live_checkpoints)
    for place, record in enumerate(live):
        if record.committed.manifest_sha256 == body.manifest_sha256:
            outcomes: dict[str, Any] = {name: (*getattr(record, name), body)}
            live[place] = replace(record, **outcomes)
    history: dict[str, Any] = {name: getattr(state, name).append(body)}
    return replace(state, live_checkpoints=tuple(live), pins=_without_pin(state.pins, body.pin_id), **history)


def _commit(state: RunState, entry: log_entry.Entry, body: kinds.CheckpointCommitted) -> RunState:
    if body.attempt != entry.writer.attempt or state.find_commit(body) is not None:
        return _refuse(state, entry)
    owner, progress = state.attempts[-1], body.step > state.high_water_step
    tokens, seconds = max(owner.committed_tokens, body.tokens), max(owner.committed_gpu_seconds, body.gpu_seconds)
    owner = replace(owner, last_committed_step=body.step, committed_tokens=tokens, committed_gpu_seconds=seconds)
    owner = replace(owner, made_progress=owner.made_progress or progress)
    record = CheckpointRecord(committed=body, committed_at=entry.at, number=state.commits)
    attempts, live = state.attempts.replace_last(owner), (*state.live_checkpoints, record)
    charges, highest = refill(state.charges) if progress else state.charges, max(state.high_water_step, body.step)
    return replace(state, attempts=attempts, live_checkpoints=live, high_water_step=highest, charges=charges)


def _without_pin(pins: tuple[kinds.CheckpointPinned, ...], pin_id: str | None) -> tuple[kinds.CheckpointPinned, ...]:
    return tuple(pin for pin in pins if pin.pin_id != pin_id)


def _move_checkpoint(state: RunState, entry: log_entry.Entry, body: kinds.CheckpointMoved) -> RunState:
    record = state.find_live(body.prefix)
    if record is None or record.committed.manifest_sha256 != body.manifest_sha256:
        return _refuse(state, entry)
    match body:
        case kinds.CheckpointQuarantined() if record.is_committed:
            detail = body.detail or record.detail
            moved = replace(record, state=CheckpointState.QUARANTINED, detail=detail, evidence=body.evidence)
        case kinds.CheckpointRestored() if record.may_be_restored:
            moved = replace(record, state=CheckpointState.COMMITTED, detail=body.detail)
        case kinds.CheckpointSuperseded() if record.is_kept and not state.is_needed(body.prefix):
            moved = replace(record, state=CheckpointState.SUPERSEDED, detail=body.why or record.detail)
        case kinds.CheckpointDeleted() if record.state == CheckpointState.SUPERSEDED:
            gone = replace(record, state=CheckpointState.DELETED, evaluations=(), failed_evaluations=())
            live = tuple(other for other in state.live_checkpoints if other is not record)
            return replace(state, live_checkpoints=live, deleted_checkpoints=state.deleted_checkpoints.append(gone))
        case _:
            return _refuse(state, entry)
    live = tuple(moved if other is record else other for other in state.live_checkpoints)
    return replace(state, live_checkpoints=live)


FOLD_EVERY_ENTRIES = 128
"""A run's folded state is cached after so many entries."""


def run_prefix(run_id: str) -> str:
    """Return the folder of a run; raise `StorageError` if the run id is not a plain name."""
    return check_key(f"runs/{check_name('run id', run_id)}")


class RunLog(fold_cache.LogFold[RunState]):
    """One run's log with its folded state; nothing is read before `refresh`. Thread-safe."""

    def __init__(self, store: ObjectStore, run_id: str, *, log: log_entry.EntryLog | None = None) -> None:
        self.store, self.run_id, self.prefix = store, run_id, run_prefix(run_id)
        log = log or log_entry.EntryLog(store=store, prefix=f"{self.prefix}/log", kinds=kinds.RUN_KINDS)
        super().__init__(log, self.prefix, fold, cache_every=FOLD_EVERY_ENTRIES)
        self._lock = threading.RLock()  # commit, evaluation and flow share one log across threads

    def refresh(self) -> RunState:
        """Read the entries appended since and return the state; the first time, start from the cached fold."""
        with self._lock:
            opened = super().refresh().opened
            if opened is not None:
                log_entry.check_place(f"{self.prefix}/log", self.run_id, opened.run_id)
            return self.state

    def _is_sound(self, head: log_entry.ReadEntry, state: RunState) -> bool:
        return head.entry.resume == state.resume

    def read_entries(self) -> tuple[log_entry.Entry, ...]:
        """Read and check every entry again, whatever is cached; oldest first, none of those read so far missing."""
        known, entries = self.seq, tuple(read.entry for read in self._log.read_after(None))
        self._log.check_reaches(len(entries) - 1, known)
        return entries

    def append(self, decide: Callable[[RunState], Any], *, writer: log_entry.Writer) -> RunState:
        """Append the body that `decide` returns for the newest state, and call it again each time a race is lost.

        `decide` may return None to append nothing, and may raise. Raises `Fenced` when the writer's attempt no longer
        owns the run or the fold would refuse the body, `AppendUnknown` when the outcome could not be established.
        """
        with self._lock:
            while True:
                state = self.refresh_whole()
                log_entry.refuse_old_writer(state.closed_to_writers(), f"run {self.run_id}")
                if state.fences(writer.attempt):
                    ended = "was ended by another process; it commits nothing more"
                    newer = f"is fenced by attempt {state.latest_attempt}"
                    why = ended if state.latest_attempt == writer.attempt else newer
                    raise Fenced(f"run {self.run_id}: attempt {writer.attempt} {why}")
                if (body := decide(state)) is None:
                    return state
                after = fold([imagined_entry(body, writer)], state)
                if len(after.refused) > len(state.refused):
                    refused = f"run {self.run_id}: every reader would refuse this entry; not written: {body}"
                    raise Fenced(state.closed_to_training() or refused)
                if (read := self._log.append(body, after=self.head, writer=writer, resume=after.resume)) is not None:
                    self._accept(read)
                    self.cache()  # where it fails, the entry is appended, and the next writer caches
                    return self.state


def imagined_entry(body: Any, writer: log_entry.Writer) -> log_entry.Entry:
    """Return an entry that is folded to see the state after it and never appended."""
    at, version = log_entry.utc_now(), log_entry.FORMAT_VERSION
    return log_entry.Entry(
        version=version, seq=-1, kind="", at=at, write_id="", prev=None, writer=writer, resume=(), body=body
    )
