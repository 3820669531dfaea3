"""The state of a run that the fold leads to; what decisions use is in memory, old items are read when asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from cairn.storage.logs import fold_cache, log_entry, run_members, run_note
from cairn.storage.logs import run_entries as entries


class CheckpointState(StrEnum):
    """The state of a committed checkpoint."""

    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    SUPERSEDED = "superseded"
    DELETED = "deleted"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """An attempt: how it started, which flow run shows it, what it committed, how it ended."""

    started: entries.AttemptStarted
    started_at: datetime
    flow_run_id: str | None = None
    ended: entries.AttemptEnded | None = None
    ended_at: datetime | None = None
    last_committed_step: int | None = None
    made_progress: bool = False
    committed_tokens: int = 0
    committed_gpu_seconds: float = 0.0

    @property
    def last_known_step(self) -> int:
        """The last step in the log: an open attempt's last committed step, or the step it started from."""
        return self.ended.last_step if self.ended else self.last_committed_step or self.started.first_step


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A checkpoint in the log: its state (committed, quarantined, superseded, deleted) and the reason for it.

    `number` counts commits; evaluations, oldest first, stay until it is deleted; `evidence` is of its last quarantine.
    """

    committed: entries.CheckpointCommitted
    committed_at: datetime
    state: CheckpointState = CheckpointState.COMMITTED
    detail: str = ""
    evidence: tuple[entries.ReadEvidence, ...] = ()
    number: int = 0
    evaluations: tuple[entries.EvaluationRecorded, ...] = ()
    failed_evaluations: tuple[entries.EvaluationFailed, ...] = ()

    @property
    def is_committed(self) -> bool:
        """Whether a resume can use it."""
        return self.state == CheckpointState.COMMITTED

    @property
    def may_be_restored(self) -> bool:
        """Whether it is quarantined because it could not be read: a read that succeeds takes it back."""
        return self.state == CheckpointState.QUARANTINED and bool(self.evidence)

    @property
    def suspects(self) -> tuple[str, ...]:
        """The objects that could not be read, of a checkpoint that a successful read takes back."""
        return tuple(item.key for item in self.evidence) if self.may_be_restored else ()

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
class Charges:
    """The charges of a reason: by which attempts since the last progress, how often in all, and their loss."""

    since_progress: tuple[int, ...] = ()
    total: int = 0
    wasted_gpu_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The state of a run after the entries read so far.

    Old items of a `History` are read when they are asked for; what an attempt's start or end, a commit or a sweep
    needs is in memory. `smallest_micro_batch` and `recomputes_activations` are what decisions after out-of-memory said,
    `abandoned_pins` those of a parent's log whose makers died before they opened this run.
    """

    opened: entries.RunOpened | None = None
    opened_at: datetime | None = None
    attempts: fold_cache.History[AttemptRecord] = field(default_factory=fold_cache.History)
    member_changes: fold_cache.History[run_members.MembersChanged] = field(default_factory=fold_cache.History)
    live_checkpoints: tuple[CheckpointRecord, ...] = ()
    deleted_checkpoints: fold_cache.History[CheckpointRecord] = field(default_factory=fold_cache.History)
    evaluations: fold_cache.History[entries.EvaluationRecorded] = field(default_factory=fold_cache.History)
    failed_evaluations: fold_cache.History[entries.EvaluationFailed] = field(default_factory=fold_cache.History)
    pins: tuple[entries.CheckpointPinned, ...] = ()
    abandoned_pins: tuple[str, ...] = ()
    quarantines: tuple[entries.DataQuarantined, ...] = ()
    finished: entries.RunFinished | None = None
    deleted: entries.RunDeleted | None = None
    deleted_at: datetime | None = None
    newer: log_entry.NewerEntry | None = None
    refused: fold_cache.History[RefusedEntry] = field(default_factory=fold_cache.History)
    high_water_step: int = 0
    charges: Mapping[str, Charges] = field(default_factory=dict)
    smallest_micro_batch: int | None = None
    recomputes_activations: bool = False
    tags: tuple[str, ...] = ()
    notes: fold_cache.History[run_note.RunNote] = field(default_factory=fold_cache.History)

    @property
    def opening(self) -> str:
        """An identity of this opening: no other run of this name has it. It is empty before the run is opened."""
        return self.opened_at.isoformat() if self.opened_at else ""

    @property
    def checkpoints(self) -> tuple[CheckpointRecord, ...]:
        """Every checkpoint in the order of the commits, read from the whole history."""
        return tuple(sorted((*self.deleted_checkpoints, *self.live_checkpoints), key=lambda record: record.number))

    @property
    def commits(self) -> int:
        """How many checkpoints were committed."""
        return len(self.deleted_checkpoints) + len(self.live_checkpoints)

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
        return self.windows_quarantined_before(self.latest_attempt + 1)

    def windows_quarantined_before(self, attempt: int) -> frozenset[int]:
        """Return the windows that this attempt does not draw."""
        inherited = self.origin.quarantined_windows if self.origin else ()  # a fork's parent did not draw them
        own = (item.windows for item in self.quarantines if item.attempt < attempt)
        return frozenset(inherited).union(*own)

    @property
    def origin(self) -> log_entry.ForkOrigin | None:
        """The checkpoint of another run that this run begins with."""
        return self.opened.forked_from if self.opened else None

    @property
    def beginning(self) -> log_entry.CheckpointReference | None:
        """A start without a commit resumes from this: None at step 0, a checkpoint of another run for a fork."""
        return self.origin.checkpoint if self.origin else None

    @property
    def resume_reference(self) -> log_entry.CheckpointReference | None:
        """The checkpoint that a start resumes from, None where it starts over."""
        return self.newest_committed.committed.reference if self.newest_committed else self.beginning

    @property
    def resume_step(self) -> int:
        """The step that a start resumes from, 0 where it starts over."""
        return self.resume_reference.step if self.resume_reference else 0

    @property
    def reached_step(self) -> int:
        """The step of the newest committed checkpoint; of a deleted run, the farthest one that was committed."""
        return self.high_water_step if self.deleted else self.resume_step

    @property
    def readable(self) -> tuple[CheckpointRecord, ...]:
        """Committed checkpoints, newest commit first."""
        return tuple(record for record in reversed(self.live_checkpoints) if record.is_committed)

    @property
    def surviving_checkpoints(self) -> tuple[CheckpointRecord, ...]:
        """The checkpoints, in step order, whose steps no later attempt trained again, without quarantined ones."""
        bounds, bound = dict[int, float](), float("inf")
        for attempt in reversed(self.attempts):
            bounds[attempt.started.attempt] = bound
            bound = min(bound, attempt.started.first_step)
        sound = (record for record in self.checkpoints if record.state != CheckpointState.QUARANTINED)
        line = (record for record in sound if record.committed.step <= bounds.get(record.committed.attempt, -1))
        return tuple(sorted(line, key=lambda record: (record.committed.step, -record.committed.attempt)))

    def surviving_evaluations(self, suite_sha256: str | None, metric: str) -> tuple[entries.EvaluationRecorded, ...]:
        """Return the newest evaluation under this suite of each surviving checkpoint that has the metric, by step."""
        newest = {item.manifest_sha256: item for item in self.evaluations if item.suite_sha256 == suite_sha256}
        line = (record.committed.manifest_sha256 for record in self.surviving_checkpoints)
        found = (newest[manifest] for manifest in line if manifest in newest)
        return tuple(item for item in found if metric in item.metrics)

    def is_doubted(self, reference: log_entry.CheckpointReference) -> bool:
        """Whether an attempt that resumed from this checkpoint ended for the store before it trained a step."""
        resumed = (attempt.ended for attempt in self.attempts if attempt.started.resumed_from == reference)
        return any(ended and ended.reason == "storage" and ended.last_step <= reference.step for ended in resumed)

    @property
    def newest_committed(self) -> CheckpointRecord | None:
        """The checkpoint that a resume starts from, or None."""
        return next(iter(self.readable), None)

    @property
    def resume(self) -> tuple[log_entry.CheckpointReference, ...]:
        """The newest eight readable checkpoints, newest first: the `resume` field of the next entry."""
        return tuple(record.committed.reference for record in self.readable[:8])

    def find(self, prefix: str) -> CheckpointRecord | None:
        """Return the checkpoint in this folder, or None; a deleted one is looked for in the whole history."""
        deleted = (record for record in reversed(self.deleted_checkpoints) if record.committed.prefix == prefix)
        return self.find_live(prefix) or next(deleted, None)

    def find_live(self, prefix: str) -> CheckpointRecord | None:
        """Return the checkpoint in this folder if it is not deleted, or None."""
        return next((record for record in reversed(self.live_checkpoints) if record.committed.prefix == prefix), None)

    def find_commit(self, body: entries.CheckpointCommitted) -> CheckpointRecord | None:
        """Return what was committed in this folder, or None; beyond its attempt's last commit, nothing was."""
        last = self.attempt(body.attempt).last_committed_step if 1 <= body.attempt <= self.latest_attempt else None
        return self.find_live(body.prefix) if last is None or body.step > last else self.find(body.prefix)

    def evaluations_of(self, manifest_sha256: str) -> Sequence[entries.EvaluationRecorded]:
        """Return the evaluations of these weights, oldest first; of deleted weights from the whole history."""
        if live := self._live_weights(manifest_sha256):
            return live.evaluations
        return [item for item in self.evaluations if item.manifest_sha256 == manifest_sha256]

    def failed_evaluations_of(self, manifest_sha256: str) -> Sequence[entries.EvaluationFailed]:
        """Return the failed evaluations of these weights, like `evaluations_of`."""
        if live := self._live_weights(manifest_sha256):
            return live.failed_evaluations
        return [item for item in self.failed_evaluations if item.manifest_sha256 == manifest_sha256]

    def _live_weights(self, manifest_sha256: str) -> CheckpointRecord | None:
        same = (item for item in self.live_checkpoints if item.committed.manifest_sha256 == manifest_sha256)
        return next(same, None)

    def attempt(self, number: int) -> AttemptRecord:
        """Return attempt `number`; attempts are numbered from 1 without a gap."""
        return self.attempts[number - 1]

    def is_needed(self, prefix: str) -> bool:
        """Whether superseding is refused: it is pinned, resumed from, or no newer one could be resumed from."""
        record, owner = self.find_live(prefix), self.open_attempt
        resumed = owner.started.resumed_from if owner else None
        if record is None or any(pin.prefix == prefix for pin in self.pins) or (resumed and resumed.prefix == prefix):
            return True
        return all(record.committed.step >= newer.committed.step for newer in self.readable)

    def closed_to_writers(self) -> str:
        """Return why this program may not append to the run, supersede or delete in it; empty if it may."""
        smallest = self.opened.smallest_writer_version if self.opened else log_entry.WRITER_VERSION
        if smallest > log_entry.WRITER_VERSION:
            return f"its run-opened asks for writer version {smallest}, this program has {log_entry.WRITER_VERSION}"
        return log_entry.describe_newer(self.newer)

    @property
    def binding_pins(self) -> tuple[entries.CheckpointPinned, ...]:
        """The pins of aliases and forks, which keep the run from being deleted; an evaluation only fails."""
        return tuple(pin for pin in self.pins if pin.alias or pin.fork)

    def closed_to_training(self) -> str:
        """Return that the run was deleted and what is left of it; empty if it was not."""
        if self.opened is None or self.deleted is None:
            return ""
        name, why = self.opened.run_id, f" ({self.deleted.why})" if self.deleted.why else ""
        who = f"on {self.deleted_at:%Y-%m-%d} by {self.deleted.by}{why}"
        return f"run {name} was deleted {who}; its log, receipts and curve stay (`cairn report {name}`)"

    def fences(self, attempt: int | None) -> bool:
        """Whether an entry written by `attempt` has no effect now; an entry of no attempt is never fenced."""
        return attempt is not None and (attempt != self.latest_attempt or self.open_attempt is None)
