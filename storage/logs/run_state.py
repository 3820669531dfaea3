"""The fold: from entries to what is true of a run. Pure; the entries are the only truth.

Owns fencing as the reader sees it: an entry written by attempt n has no effect once an attempt-started with a greater
number, or the attempt's own end, precedes it. Refuses to know where entries come from.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from storage.logs.log_entry import Entry
from storage.logs.run_entries import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointReference,
    CheckpointSuperseded,
    CheckpointUnpinned,
    DataQuarantined,
    EvaluationFailed,
    EvaluationRecorded,
    RunFinished,
    RunOpened,
)

RESUME_LENGTH = 8
COMMITTED, QUARANTINED, SUPERSEDED, DELETED = "committed", "quarantined", "superseded", "deleted"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """An attempt's receipt while it grows: how it started, what it committed, how it ended."""

    started: AttemptStarted
    started_at: datetime
    ended: AttemptEnded | None = None
    ended_at: datetime | None = None
    last_committed_step: int | None = None
    made_progress: bool = False

    @property
    def last_known_step(self) -> int:
        """The farthest step the log knows of: of an open attempt what it committed, or where it set out from."""
        return self.ended.last_step if self.ended else self.last_committed_step or self.started.first_step


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A checkpoint the log knows, with its state: committed, quarantined, superseded or deleted, and why."""

    committed: CheckpointCommitted
    committed_at: datetime
    state: str = COMMITTED
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedEntry:
    """An entry that has no effect, because its writer was fenced or what it says could not be so."""

    seq: int
    kind: str
    attempt: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Everything that is true of a run after its entries so far."""

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

    @property
    def latest_attempt(self) -> int:
        """Number of the newest claim, 0 before the first."""
        return self.attempts[-1].started.attempt if self.attempts else 0

    @property
    def open_attempt(self) -> AttemptRecord | None:
        """The attempt that owns the run, if it has not ended."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].ended is None else None

    @property
    def quarantined_windows(self) -> frozenset[int]:
        """The samples no attempt draws any more."""
        return frozenset(window for quarantine in self.quarantines for window in quarantine.windows)

    @property
    def readable(self) -> tuple[CheckpointRecord, ...]:
        """Committed checkpoints, newest commit first."""
        return tuple(record for record in reversed(self.checkpoints) if record.state == COMMITTED)

    @property
    def surviving_line(self) -> tuple[CheckpointRecord, ...]:
        """One checkpoint for each committed step that no later attempt trained again, in step order.

        Aged-out ones are of it too; quarantined ones are not: what followed from them is trained again.
        """
        line, bound = list[CheckpointRecord](), float("inf")
        for attempt in reversed(self.attempts):
            number = attempt.started.attempt
            line += [
                record
                for record in self.checkpoints
                if record.committed.attempt == number and record.committed.step <= bound and record.state != QUARANTINED
            ]
            bound = min(bound, attempt.started.first_step)
        return tuple(sorted(line, key=lambda record: record.committed.step))

    @property
    def newest_committed(self) -> CheckpointRecord | None:
        """The checkpoint a resume starts from."""
        return next(iter(self.readable), None)

    @property
    def resume(self) -> tuple[CheckpointReference, ...]:
        """The newest readable checkpoints, newest first, as every entry carries them."""
        return tuple(record.committed.reference for record in self.readable[:RESUME_LENGTH])

    @property
    def high_water_step(self) -> int:
        """The greatest step ever committed: what counts as progress must pass it."""
        return max((record.committed.step for record in self.checkpoints), default=0)

    def find(self, prefix: str) -> CheckpointRecord | None:
        """Return the checkpoint in this folder, or None where the log knows none."""
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

    def fences(self, attempt: int | None) -> bool:
        """Whether an entry written by `attempt` is refused now; entries of no attempt never are."""
        if attempt is None:
            return False
        return attempt != self.latest_attempt or self.open_attempt is None


def fold(entries: Iterable[Entry], state: RunState | None = None) -> RunState:
    """Return the state after `entries`, beginning from `state` or from nothing."""
    result = state or RunState()
    for entry in entries:
        result = _after(result, entry)
    return result


def _after(state: RunState, entry: Entry) -> RunState:
    body = entry.body
    if isinstance(body, AttemptStarted):
        return _started(state, entry, body)
    if state.fences(entry.writer.attempt):
        return _refused(state, entry)
    match body:
        case RunOpened() if state.opened is None:
            return replace(state, opened=body, opened_at=entry.at)
        case AttemptEnded():
            return _ended(state, entry, body)
        case RunFinished():
            return replace(state, finished=body)
        case DataQuarantined():
            return replace(state, quarantines=(*state.quarantines, body))
        case EvaluationRecorded():
            return replace(state, evaluations=(*state.evaluations, body), pins=_evaluated(state.pins, body))
        case EvaluationFailed():
            failed = (*state.failed_evaluations, body)
            return replace(state, failed_evaluations=failed, pins=_evaluated(state.pins, body))
        case _:
            return _after_checkpoint_entry(state, entry)


def _after_checkpoint_entry(state: RunState, entry: Entry) -> RunState:
    match body := entry.body:
        case CheckpointCommitted():
            return _committed(state, entry, body)
        case CheckpointQuarantined():
            return _moved(state, entry, body, {COMMITTED}, QUARANTINED, body.detail)
        case CheckpointSuperseded() if state.is_needed(body.prefix):
            return _refused(state, entry)
        case CheckpointSuperseded():
            return _moved(state, entry, body, {COMMITTED, QUARANTINED}, SUPERSEDED, body.why)
        case CheckpointDeleted():
            return _moved(state, entry, body, {SUPERSEDED}, DELETED, "")
        case CheckpointPinned():
            return _pinned(state, entry, body)
        case CheckpointUnpinned():
            return replace(state, pins=tuple(pin for pin in state.pins if pin.hold_id != body.hold_id))
        case _:
            return state


def _refused(state: RunState, entry: Entry) -> RunState:
    refused = RefusedEntry(seq=entry.seq, kind=entry.kind, attempt=entry.writer.attempt)
    return replace(state, refused=(*state.refused, refused))


def _started(state: RunState, entry: Entry, body: AttemptStarted) -> RunState:
    if body.attempt != state.latest_attempt + 1 or state.open_attempt is not None:
        return _refused(state, entry)
    started = AttemptRecord(started=body, started_at=entry.at)
    pins = tuple(pin for pin in state.pins if pin.during_attempt is None)
    return replace(state, attempts=(*state.attempts, started), pins=pins)


def _committed(state: RunState, entry: Entry, body: CheckpointCommitted) -> RunState:
    if body.attempt != entry.writer.attempt or state.find(body.prefix) is not None:
        return _refused(state, entry)
    progress = body.step > state.high_water_step
    owner = state.attempts[-1]
    owner = replace(owner, last_committed_step=body.step, made_progress=owner.made_progress or progress)
    record = CheckpointRecord(committed=body, committed_at=entry.at)
    return replace(state, attempts=(*state.attempts[:-1], owner), checkpoints=(*state.checkpoints, record))


def _ended(state: RunState, entry: Entry, body: AttemptEnded) -> RunState:
    owner = state.open_attempt
    if owner is None or owner.started.attempt != body.attempt:
        return _refused(state, entry)
    return replace(state, attempts=(*state.attempts[:-1], replace(owner, ended=body, ended_at=entry.at)))


def _pinned(state: RunState, entry: Entry, body: CheckpointPinned) -> RunState:
    record = state.find(body.prefix)
    late = body.during_attempt is not None and body.during_attempt != state.latest_attempt
    if record is None or record.state != COMMITTED or record.committed.manifest_sha256 != body.manifest_sha256 or late:
        return _refused(state, entry)
    return replace(state, pins=(*state.pins, body))


def _evaluated(
    pins: tuple[CheckpointPinned, ...], body: EvaluationRecorded | EvaluationFailed
) -> tuple[CheckpointPinned, ...]:
    """End only the pin this outcome names: another evaluator of the same weights may still read them."""
    return tuple(pin for pin in pins if body.hold_id is None or pin.hold_id != body.hold_id)


def _moved(
    state: RunState,
    entry: Entry,
    body: CheckpointQuarantined | CheckpointSuperseded | CheckpointDeleted,
    before: set[str],
    after: str,
    detail: str,
) -> RunState:
    record = state.find(body.prefix)
    if record is None or record.state not in before or record.committed.manifest_sha256 != body.manifest_sha256:
        return _refused(state, entry)
    moved = replace(record, state=after, detail=detail or record.detail)
    checkpoints = tuple(moved if other is record else other for other in state.checkpoints)
    return replace(state, checkpoints=checkpoints)
