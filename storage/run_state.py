"""The fold: from entries to what is true of a run. Pure; the entries are the only truth.

Owns fencing as the reader sees it: an entry written by attempt n has no effect once an attempt-started with a greater
number, or the attempt's own end, precedes it. Refuses to know where entries come from.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from storage.log_entry import Entry
from storage.run_entries import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointQuarantined,
    CheckpointReference,
    EvaluationFailed,
    EvaluationRecorded,
    RunFinished,
    RunOpened,
)

RESUME_LENGTH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """An attempt's receipt while it grows: how it started, what it committed, how it ended."""

    started: AttemptStarted
    started_at: datetime
    ended: AttemptEnded | None = None
    ended_at: datetime | None = None
    last_committed_step: int | None = None
    made_progress: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A checkpoint the log knows, with its state: committed or quarantined."""

    committed: CheckpointCommitted
    committed_at: datetime
    state: str = "committed"
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Everything that is true of a run after its entries so far."""

    opened: RunOpened | None = None
    opened_at: datetime | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    checkpoints: tuple[CheckpointRecord, ...] = ()
    evaluations: tuple[EvaluationRecorded, ...] = ()
    failed_evaluations: tuple[EvaluationFailed, ...] = ()
    finished: RunFinished | None = None
    refused: tuple[Entry, ...] = ()

    @property
    def latest_attempt(self) -> int:
        """Number of the newest claim, 0 before the first."""
        return self.attempts[-1].started.attempt if self.attempts else 0

    @property
    def open_attempt(self) -> AttemptRecord | None:
        """The attempt that owns the run, if it has not ended."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].ended is None else None

    @property
    def readable(self) -> tuple[CheckpointRecord, ...]:
        """Committed checkpoints, newest commit first."""
        return tuple(record for record in reversed(self.checkpoints) if record.state == "committed")

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
        if body.attempt != state.latest_attempt + 1 or state.open_attempt is not None:
            return replace(state, refused=(*state.refused, entry))
        started = AttemptRecord(started=body, started_at=entry.at)
        return replace(state, attempts=(*state.attempts, started))
    if state.fences(entry.writer.attempt):
        return replace(state, refused=(*state.refused, entry))
    match body:
        case RunOpened() if state.opened is None:
            return replace(state, opened=body, opened_at=entry.at)
        case CheckpointCommitted():
            return _committed(state, entry, body)
        case AttemptEnded():
            return _ended(state, entry, body)
        case CheckpointQuarantined():
            return replace(state, checkpoints=tuple(_quarantined(record, body) for record in state.checkpoints))
        case EvaluationRecorded():
            return replace(state, evaluations=(*state.evaluations, body))
        case EvaluationFailed():
            return replace(state, failed_evaluations=(*state.failed_evaluations, body))
        case RunFinished():
            return replace(state, finished=body)
        case _:
            return state


def _committed(state: RunState, entry: Entry, body: CheckpointCommitted) -> RunState:
    if body.attempt != entry.writer.attempt or state.fences(body.attempt):
        return replace(state, refused=(*state.refused, entry))
    progress = body.step > state.high_water_step
    owner = state.attempts[-1]
    owner = replace(owner, last_committed_step=body.step, made_progress=owner.made_progress or progress)
    record = CheckpointRecord(committed=body, committed_at=entry.at)
    return replace(state, attempts=(*state.attempts[:-1], owner), checkpoints=(*state.checkpoints, record))


def _ended(state: RunState, entry: Entry, body: AttemptEnded) -> RunState:
    owner = state.open_attempt
    if owner is None or owner.started.attempt != body.attempt:
        return replace(state, refused=(*state.refused, entry))
    return replace(state, attempts=(*state.attempts[:-1], replace(owner, ended=body, ended_at=entry.at)))


def _quarantined(record: CheckpointRecord, body: CheckpointQuarantined) -> CheckpointRecord:
    if record.committed.manifest_sha256 != body.manifest_sha256 or record.committed.prefix != body.prefix:
        return record
    return replace(record, state="quarantined", detail=body.detail)
