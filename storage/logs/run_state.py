"""The fold from a run's entries to its state. Pure.

An entry written by attempt n has no effect after an attempt-started with a greater number or after the attempt's own
end: this is fencing on the reader's side.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from storage.logs.log_entry import WRITER_VERSION, CheckpointReference, Entry, NewerEntry, newer_entry, told_newer
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
    ReadEvidence,
    RunFinished,
    RunOpened,
)


class CheckpointState(StrEnum):
    """The state of a committed checkpoint."""

    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    SUPERSEDED = "superseded"
    DELETED = "deleted"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """An attempt: how it started, what it committed, how it ended."""

    started: AttemptStarted
    started_at: datetime
    ended: AttemptEnded | None = None
    ended_at: datetime | None = None
    last_committed_step: int | None = None
    made_progress: bool = False

    @property
    def last_known_step(self) -> int:
        """The last step in the log: an open attempt's last committed step, or the step it started from."""
        return self.ended.last_step if self.ended else self.last_committed_step or self.started.first_step


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A checkpoint in the log: its state (committed, quarantined, superseded, deleted) and the reason for it.

    `evidence` is that of its last quarantine.
    """

    committed: CheckpointCommitted
    committed_at: datetime
    state: CheckpointState = CheckpointState.COMMITTED
    detail: str = ""
    evidence: tuple[ReadEvidence, ...] = ()

    @property
    def is_committed(self) -> bool:
        """Whether a resume can use it."""
        return self.state == CheckpointState.COMMITTED

    @property
    def may_be_restored(self) -> bool:
        """Whether it is quarantined because it could not be read: a look that succeeds takes it back."""
        return self.state == CheckpointState.QUARANTINED and bool(self.evidence)

    @property
    def is_kept(self) -> bool:
        """Whether retention still keeps its bytes."""
        return self.state in (CheckpointState.COMMITTED, CheckpointState.QUARANTINED)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedEntry:
    """An entry without effect: its writer was fenced, or it contradicts an earlier entry."""

    seq: int
    kind: str
    attempt: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The state of a run after the entries read so far."""

    opened: RunOpened | None = None
    opened_at: datetime | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    checkpoints: tuple[CheckpointRecord, ...] = ()
    evaluations: tuple[EvaluationRecorded, ...] = ()
    failed_evaluations: tuple[EvaluationFailed, ...] = ()
    pins: tuple[CheckpointPinned, ...] = ()
    quarantines: tuple[DataQuarantined, ...] = ()
    finished: RunFinished | None = None
    refused: tuple[RefusedEntry, ...] = ()
    newer: NewerEntry | None = None

    @property
    def latest_attempt(self) -> int:
        """The number of the newest attempt, 0 before the first."""
        return self.attempts[-1].started.attempt if self.attempts else 0

    @property
    def open_attempt(self) -> AttemptRecord | None:
        """The attempt that owns the run, or None if it has ended."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].ended is None else None

    @property
    def quarantined_windows(self) -> frozenset[int]:
        """The windows that are never drawn again."""
        return frozenset(window for quarantine in self.quarantines for window in quarantine.windows)

    @property
    def readable(self) -> tuple[CheckpointRecord, ...]:
        """Committed checkpoints, newest commit first."""
        return tuple(record for record in reversed(self.checkpoints) if record.is_committed)

    @property
    def surviving_checkpoints(self) -> tuple[CheckpointRecord, ...]:
        """The checkpoints, in step order, whose steps no later attempt trained again.

        Superseded and deleted ones are included. Quarantined ones are not: what followed from them is trained again.
        """
        line, bound = list[CheckpointRecord](), float("inf")
        sound = [record for record in self.checkpoints if record.state != CheckpointState.QUARANTINED]
        for attempt in reversed(self.attempts):
            mine = (record for record in sound if record.committed.attempt == attempt.started.attempt)
            line += [record for record in mine if record.committed.step <= bound]
            bound = min(bound, attempt.started.first_step)
        return tuple(sorted(line, key=lambda record: record.committed.step))

    @property
    def candidates(self) -> tuple[CheckpointRecord, ...]:
        """What a resume may look at, newest commit first: readable checkpoints, and those that may be restored."""
        return tuple(record for record in reversed(self.checkpoints) if record.is_committed or record.may_be_restored)

    @property
    def newest_committed(self) -> CheckpointRecord | None:
        """The checkpoint that a resume starts from, or None."""
        return next(iter(self.readable), None)

    @property
    def resume(self) -> tuple[CheckpointReference, ...]:
        """The newest eight readable checkpoints, newest first: the `resume` field of the next entry."""
        return tuple(record.committed.reference for record in self.readable[:8])

    @property
    def high_water_step(self) -> int:
        """The greatest step ever committed; only a commit beyond it is progress."""
        return max((record.committed.step for record in self.checkpoints), default=0)

    def find(self, prefix: str) -> CheckpointRecord | None:
        """Return the checkpoint in this folder, or None."""
        return next((record for record in reversed(self.checkpoints) if record.committed.prefix == prefix), None)

    def is_needed(self, prefix: str) -> bool:
        """Whether superseding is refused: it is pinned, resumed from, or no newer one could be resumed from."""
        record, owner = self.find(prefix), self.open_attempt
        resumed = owner.started.resumed_from if owner else None
        return (
            record is None
            or any(pin.prefix == prefix for pin in self.pins)
            or (resumed is not None and resumed.prefix == prefix)
            or all(record.committed.step >= newer.committed.step for newer in self.readable)
        )

    def closed_to_writers(self) -> str:
        """Return why this program may not append to the run, supersede or delete in it; empty if it may."""
        smallest = self.opened.smallest_writer_version if self.opened else WRITER_VERSION
        if smallest > WRITER_VERSION:
            return f"its run-opened asks for writer version {smallest}, this program has {WRITER_VERSION}"
        return told_newer(self.newer) if self.newer else ""

    def fences(self, attempt: int | None) -> bool:
        """Whether an entry written by `attempt` has no effect now; an entry of no attempt is never fenced."""
        if attempt is None:
            return False
        return attempt != self.latest_attempt or self.open_attempt is None


def fold(entries: Iterable[Entry], state: RunState | None = None) -> RunState:
    """Return the state after `entries`, starting from `state` or from an empty run."""
    result = state or RunState()
    for entry in entries:
        result = _apply(result, entry)
    return result


def _apply(state: RunState, entry: Entry) -> RunState:
    body, owner = entry.body, state.open_attempt
    if isinstance(body, dict):
        return state if state.newer else replace(state, newer=newer_entry(entry))
    if isinstance(body, AttemptStarted):
        if body.attempt != state.latest_attempt + 1 or owner is not None:
            return _refuse(state, entry)
        started = AttemptRecord(started=body, started_at=entry.at)
        pins = tuple(pin for pin in state.pins if pin.during_attempt is None)
        return replace(state, attempts=(*state.attempts, started), pins=pins)
    if state.fences(entry.writer.attempt):
        return _refuse(state, entry)
    match body:
        case RunOpened() if state.opened is None:
            return replace(state, opened=body, opened_at=entry.at)
        case AttemptEnded():
            if owner is None or owner.started.attempt != body.attempt:
                return _refuse(state, entry)
            return replace(state, attempts=(*state.attempts[:-1], replace(owner, ended=body, ended_at=entry.at)))
        case RunFinished():
            return replace(state, finished=body)
        case DataQuarantined():
            return replace(state, quarantines=(*state.quarantines, body))
        case EvaluationRecorded():
            return replace(state, evaluations=(*state.evaluations, body), pins=_without_pin(state.pins, body.hold_id))
        case EvaluationFailed():
            failed = (*state.failed_evaluations, body)
            return replace(state, failed_evaluations=failed, pins=_without_pin(state.pins, body.hold_id))
        case _:
            return _apply_checkpoint_entry(state, entry)


def _apply_checkpoint_entry(state: RunState, entry: Entry) -> RunState:
    match body := entry.body:
        case CheckpointCommitted():
            return _commit(state, entry, body)
        case CheckpointQuarantined() | CheckpointRestored() | CheckpointSuperseded() | CheckpointDeleted():
            return _move_checkpoint(state, entry, body)
        case CheckpointPinned():
            record = state.find(body.prefix)
            late = body.during_attempt is not None and body.during_attempt != state.latest_attempt
            committed = record.committed.manifest_sha256 if record is not None and record.is_committed else None
            if late or committed != body.manifest_sha256:
                return _refuse(state, entry)
            return replace(state, pins=(*state.pins, body))
        case CheckpointUnpinned():
            return replace(state, pins=_without_pin(state.pins, body.hold_id))
        case _:
            return state


def _refuse(state: RunState, entry: Entry) -> RunState:
    refused = RefusedEntry(seq=entry.seq, kind=entry.kind, attempt=entry.writer.attempt)
    return replace(state, refused=(*state.refused, refused))


def _commit(state: RunState, entry: Entry, body: CheckpointCommitted) -> RunState:
    if body.attempt != entry.writer.attempt or state.find(body.prefix) is not None:
        return _refuse(state, entry)
    progress = body.step > state.high_water_step
    owner = state.attempts[-1]
    owner = replace(owner, last_committed_step=body.step, made_progress=owner.made_progress or progress)
    record = CheckpointRecord(committed=body, committed_at=entry.at)
    return replace(state, attempts=(*state.attempts[:-1], owner), checkpoints=(*state.checkpoints, record))


def _without_pin(pins: tuple[CheckpointPinned, ...], hold_id: str | None) -> tuple[CheckpointPinned, ...]:
    return tuple(pin for pin in pins if pin.hold_id != hold_id)


def _move_checkpoint(
    state: RunState,
    entry: Entry,
    body: CheckpointQuarantined | CheckpointRestored | CheckpointSuperseded | CheckpointDeleted,
) -> RunState:
    record = state.find(body.prefix)
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
            moved = replace(record, state=CheckpointState.DELETED)
        case _:
            return _refuse(state, entry)
    checkpoints = tuple(moved if other is record else other for other in state.checkpoints)
    return replace(state, checkpoints=checkpoints)
