"""The sweep: supersede what the plan gives up, then delete it and what ended attempts left behind.

It can be killed anywhere and run again; it reads the log before each deletion, and the fold can still refuse.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

from cairn.storage.checkpoints.checkpoint_shard import ReadPolicy
from cairn.storage.checkpoints.resume_point import Finding, collect_evidence, fails_alike, restored_entry, unpin_entry
from cairn.storage.errors import IntegrityError
from cairn.storage.logs import log_entry, run_entries, run_index, run_log, run_state, window_losses
from cairn.storage.stores.object_store import UnfinishedWrite

STALE_SECONDS = 86_400.0
"""Age, by the store's clock, at which an unfinished write that no attempt can need is discarded."""
_FOLDER = re.compile(r"step-(\d+)-attempt-(\d+)\Z")
_ENTRY = re.compile(r"/log/(\d{10}\.json)\Z")
_ATTEMPT = re.compile(r"/(?:heartbeats|steps)/attempt-(\d+)\D*\Z")


class SweepAction(StrEnum):
    """The action of a sweep on one thing."""

    KEEP = "keep"
    SUPERSEDE = "supersede"
    DELETE = "delete"
    UNPIN = "unpin"
    DISCARD = "discard"


class SweepKind(StrEnum):
    """The things that a sweep checks: checkpoints, staged folders, unfinished writes, pins."""

    CHECKPOINT = "checkpoint"
    STAGED = "staged"
    UNFINISHED = "unfinished"
    PIN = "pin"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """The findings on one state: its pins, its readable or quarantined checkpoints, and all other folders."""

    pins: tuple[Finding, ...]
    checkpoints: tuple[Finding, ...]
    staged: tuple[Finding, ...]


Plan = Callable[[run_state.RunState, Sequence[str]], SweepPlan]
"""Pure; the folders were listed before the state was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepItem:
    """One thing that a sweep checked: the action taken, or planned in a dry run, and why."""

    kind: SweepKind
    key: str
    step: int | None
    attempt: int | None
    action: SweepAction
    why: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepReport:
    """The findings and actions of a sweep; `freed_bytes` counts deleted and discarded bytes."""

    run_id: str
    dry_run: bool
    items: tuple[SweepItem, ...]
    freed_bytes: int


def parse_checkpoint_folder(prefix: str) -> tuple[int, int] | None:
    """Return step and attempt of a checkpoint's folder, or None for any other folder."""
    named = _FOLDER.search(prefix)
    return (int(named[1]), int(named[2])) if named else None


def sweep(log: run_log.RunLog, plan: Plan, *, writer: log_entry.Writer, dry_run: bool = False) -> SweepReport:
    """Unpin, supersede, delete and discard what the plan gives up; with `dry_run` only report it.

    The writer belongs to no attempt. The next sweep completes one that was killed. Raises `StoreUnavailable` or
    `AppendUnknown` with everything consistent, `IntegrityError` if the log does not verify.
    """
    return _Sweep(log, plan, writer, dry_run).run()


class _Sweep:
    """One sweep; a dry run folds the entries that it would append onto its own state."""

    def __init__(self, log: run_log.RunLog, plan: Plan, writer: log_entry.Writer, dry_run: bool) -> None:
        self._log, self._plan, self._writer, self._dry_run = log, plan, writer, dry_run
        self._store, self._folder = log.store, f"{log.prefix}/checkpoints"
        self._state, self._items, self._confirmed = run_state.RunState(), list[SweepItem](), set[str]()

    def run(self) -> SweepReport:
        folders = self._store.folders(self._folder)  # before the log: a commit after it is no orphan
        # The index of runs is everybody's: what a killed watcher left there, any sweep discards.
        unfinished = [*self._store.unfinished(self._log.prefix), *self._store.unfinished(run_index.INDEX_FOLDER)]
        self._state = self._log.refresh()
        if not self._dry_run:
            log_entry.refuse_old_writer(self._state.closed_to_writers(), f"run {self._log.run_id}")
        pins = {pin.pin_id: pin for pin in self._state.pins}
        for finding in self._plan(self._state, ()).pins:
            pin = pins[finding.key]
            if finding.is_over:
                self._append(partial(unpin_entry, pin, finding.why))
            self._note(SweepKind.PIN, replace(finding, key=pin.prefix), SweepAction.UNPIN)
        # What needs no entry goes first: in a full store it makes the room for entries.
        for finding in self._plan(self._state, folders).staged:
            if sizes := self._store.sizes(finding.key):
                if finding.is_over:
                    self._delete_bytes(finding.key)
                self._note(SweepKind.STAGED, finding, SweepAction.DELETE, size=sum(sizes.values()))
        kept = self._discard_unfinished(unfinished)
        self._supersede()
        for write, finding in self._discard_unfinished([write for write, _ in kept]):
            self._note(SweepKind.UNFINISHED, finding, SweepAction.DISCARD, size=write.bytes)
        if self._state.deleted is not None and not self._dry_run:
            self._store.delete_all(self._store.keys(window_losses.losses_folder(self._log.prefix)))
        for record in self._state.live_checkpoints:  # last: a run that is deleted has nothing else left then
            if record.state == run_state.CheckpointState.SUPERSEDED:
                self._delete_checkpoint(record)
        freed = sum(item.bytes for item in self._items if item.action in (SweepAction.DELETE, SweepAction.DISCARD))
        return SweepReport(run_id=self._log.run_id, dry_run=self._dry_run, items=tuple(self._items), freed_bytes=freed)

    def _supersede(self) -> None:
        for finding in self._plan(self._state, ()).checkpoints:
            if finding.is_over:
                self._check_own(finding.key)
                if kept := self._reason_to_spare(self._record(finding.key)):
                    self._note(SweepKind.CHECKPOINT, replace(finding, is_over=False, why=kept), SweepAction.KEEP)
                    continue
                self._append(partial(self._superseding, finding.key))
            record = self._record(finding.key)
            # It may have been needed again since this began: then the reason comes from the newest state.
            newest = self._finding(finding.key, self._state) if record.is_kept and finding.is_over else None
            decided = replace(newest or finding, is_over=not record.is_kept)
            self._note(SweepKind.CHECKPOINT, decided, SweepAction.SUPERSEDE, size=record.committed.bytes)

    def _reason_to_spare(self, record: run_state.CheckpointRecord) -> str:
        """Read a quarantined checkpoint again before it is given up for good; one that verifies is taken back."""
        if not record.may_be_restored:
            return ""
        policy = ReadPolicy(sleep=lambda seconds: None)
        fresh = collect_evidence(self._log, record.committed, record.suspects, policy=policy, sizes_only=False)
        if not fresh:
            self._append(partial(restored_entry, record.committed))
            return "was quarantined, and verifies again: taken back"
        if not fails_alike(fresh, record.evidence):
            found = f"{fresh[0].key}: {fresh[0].found}"
            return f"quarantined ({record.detail}), and fresh reads fail in another way: {found}"
        self._confirmed.add(record.committed.prefix)
        return ""

    def _superseding(self, prefix: str, state: run_state.RunState) -> run_entries.CheckpointSuperseded | None:
        """Decide again on the newest state: it may be pinned, resumed from, needed or quarantined by now."""
        record, finding = state.find_live(prefix), self._finding(prefix, state)
        if record is None or finding is None or not finding.is_over or state.is_needed(prefix):
            return None
        if record.may_be_restored and prefix not in self._confirmed:
            return None
        return run_entries.CheckpointSuperseded(why=finding.why, **asdict(record.committed.reference))

    def _finding(self, prefix: str, state: run_state.RunState) -> Finding | None:
        return next((finding for finding in self._plan(state, ()).checkpoints if finding.key == prefix), None)

    def _delete_checkpoint(self, record: run_state.CheckpointRecord) -> None:
        prefix, size = record.committed.prefix, record.committed.bytes
        if not self._dry_run:
            self._state = self._log.refresh()
        if not _is_superseded(prefix, self._state):
            return  # another sweep has deleted it
        self._delete_bytes(prefix)
        body = run_entries.CheckpointDeleted(bytes=size, **asdict(record.committed.reference))
        self._append(lambda state: body if _is_superseded(prefix, state) else None)
        finding = Finding(key=prefix, is_over=True, why=f"superseded: {record.detail}")
        self._note(SweepKind.CHECKPOINT, finding, SweepAction.DELETE, size=size)

    def _delete_bytes(self, prefix: str) -> None:
        """Delete everything under the folder, the manifest last."""
        self._check_own(prefix)
        if not self._dry_run:
            log_entry.refuse_old_writer(self._state.closed_to_writers(), f"run {self._log.run_id}")
        keys, manifest = [] if self._dry_run else self._store.keys(prefix), f"{prefix}/manifest.json"
        self._store.delete_all([key for key in keys if key != manifest])
        self._store.delete_all([key for key in keys if key == manifest])

    def _check_own(self, prefix: str) -> None:
        """Refuse to delete anything but a checkpoint folder of this run, whatever the log says."""
        if self._checkpoint_folder(f"{prefix}/") != prefix or parse_checkpoint_folder(prefix) is None:
            problem = f"names {prefix} as a checkpoint, which is not a checkpoint folder of run {self._log.run_id}"
            advice = "nothing more is deleted. Find the entry with `cairn log` and what wrote it"
            raise IntegrityError(f"{self._log.prefix}/log {problem}; {advice}")

    def _discard_unfinished(self, writes: Sequence[UnfinishedWrite]) -> list[tuple[UnfinishedWrite, Finding]]:
        """Discard the writes that are over, and return the others with the reason why not."""
        kept = list[tuple[UnfinishedWrite, Finding]]()
        for write in writes:
            finding = self._judge_unfinished(write)
            if not finding.is_over:
                kept.append((write, finding))
                continue
            if not self._dry_run:
                self._store.discard(write)
            self._note(SweepKind.UNFINISHED, finding, SweepAction.DISCARD, size=write.bytes)
        return kept

    def _judge_unfinished(self, write: UnfinishedWrite) -> Finding:
        folder, entry, named = self._checkpoint_folder(write.key), _ENTRY.search(write.key), _ATTEMPT.search(write.key)
        staged = self._plan(self._state, [folder]).staged if folder else ()
        record = self._state.find(folder) if folder else None
        ended, is_over = self._state.latest_attempt - (self._state.open_attempt is not None), True
        if staged:
            is_over, why = staged[0].is_over, staged[0].why
        elif record is not None and not record.is_kept:
            why = f"its checkpoint is {record.state}"
        elif entry and log_entry.seq_of(entry[1]) <= self._log.seq:
            why = "another entry has its number"
        elif named and 0 < int(named[1]) <= ended:
            why = f"attempt {int(named[1])} has ended"
        elif is_over := write.age_seconds > STALE_SECONDS:
            why = f"unfinished for {write.age_seconds / 3600:.0f} h"
        else:
            why = "may still be written"
        return Finding(key=write.key, is_over=is_over, why=why)

    def _checkpoint_folder(self, key: str) -> str | None:
        folder, separator, _ = key.removeprefix(f"{self._folder}/").partition("/")
        return f"{self._folder}/{folder}" if separator and key.startswith(f"{self._folder}/") else None

    def _append(self, decide: Callable[[run_state.RunState], Any]) -> None:
        if not self._dry_run:
            self._state = self._log.append(decide, writer=self._writer)
        elif (body := decide(self._state)) is not None:
            self._state = run_log.fold([run_log.imagined_entry(body, self._writer)], self._state)

    def _record(self, prefix: str) -> run_state.CheckpointRecord:
        record = self._state.find(prefix)
        assert record is not None  # no entry makes the log forget a checkpoint
        return record

    def _note(self, kind: SweepKind, finding: Finding, action: SweepAction, *, size: int = 0) -> None:
        """Report the action, or KEEP if the thing is still needed."""
        step, attempt = parse_checkpoint_folder(self._checkpoint_folder(f"{finding.key}/") or "") or (None, None)
        done = action if finding.is_over else SweepAction.KEEP
        self._items.append(
            SweepItem(kind=kind, key=finding.key, step=step, attempt=attempt, action=done, why=finding.why, bytes=size)
        )


def _is_superseded(prefix: str, state: run_state.RunState) -> bool:
    record = state.find_live(prefix)
    return record is not None and record.state == run_state.CheckpointState.SUPERSEDED
