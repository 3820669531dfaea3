"""The sweep: what retention gives up is superseded, then deleted; what ended attempts left behind is deleted.

Owns the order that survives being killed anywhere and run again, and the proof read from the log right before anything
goes. Refuses to know what is worth keeping: a plan given by the caller says that, and the fold has the last word.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from storage.checkpoints.checkpoint_pin import unpin_entry
from storage.errors import IntegrityError
from storage.logs.log_entry import Writer
from storage.logs.run_entries import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointPinned,
    CheckpointSuperseded,
)
from storage.logs.run_log import RunLog, imagined_entry
from storage.logs.run_state import COMMITTED, DELETED, QUARANTINED, SUPERSEDED, CheckpointRecord, RunState, fold
from storage.stores.object_store import ObjectStore, UnfinishedWrite

KEEP, SUPERSEDE, DELETE, UNPIN, DISCARD = "keep", "supersede", "delete", "release", "discard"
CHECKPOINT, STAGED, UNFINISHED, PIN = "checkpoint", "staged", "unfinished", "hold"
STALE_SECONDS = 86_400.0
"""By the store's own clock: an unfinished write this old that no attempt can still need is nobody's any more."""
_FOLDER = re.compile(r"step-(\d+)-attempt-(\d+)\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What becomes of one thing, and why; `key` is a checkpoint's folder or a pin's id."""

    key: str
    is_over: bool
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """The verdicts on one state: every pin, every checkpoint whose bytes are promised, every other folder."""

    pins: tuple[Verdict, ...]
    checkpoints: tuple[Verdict, ...]
    staged: tuple[Verdict, ...]


Plan = Callable[[RunState, Sequence[str]], SweepPlan]
"""Pure: from a state, and folders listed before that state was read, to the verdicts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepItem:
    """One thing a sweep looked at: what was done with it (or would be), and why."""

    kind: str
    key: str
    step: int | None
    attempt: int | None
    action: str
    why: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepReport:
    """What a sweep did, or would do; `freed_bytes` counts what was deleted and discarded."""

    run_id: str
    dry_run: bool
    items: tuple[SweepItem, ...]
    freed_bytes: int


def parse_checkpoint_folder(prefix: str) -> tuple[int, int] | None:
    """Return step and attempt of a checkpoint's folder, or None for a folder of another name."""
    named = _FOLDER.search(prefix)
    return (int(named[1]), int(named[2])) if named else None


def sweep(log: RunLog, plan: Plan, *, writer: Writer, dry_run: bool = False) -> SweepReport:
    """Unpin what is no longer needed, supersede, delete, discard; with `dry_run` only say so.

    The writer belongs to no attempt: a sweep is nobody's epoch. Whatever a killed sweep left undone, the next one does.
    Raises `StoreUnavailable` or `AppendUnknown` with everything consistent, `IntegrityError` where the log is broken.
    """
    return _Sweep(log, plan, writer, dry_run).run()


class _Sweep:
    """One sweep; a dry one folds the entries it would append onto its own state and goes the same way."""

    def __init__(self, log: RunLog, plan: Plan, writer: Writer, dry_run: bool) -> None:
        self._log, self._plan, self._writer, self._dry_run = log, plan, writer, dry_run
        self._store: ObjectStore = log.store
        self._folder = f"{log.prefix}/checkpoints"
        self._items: list[SweepItem] = []
        self._state = RunState()

    def run(self) -> SweepReport:
        folders = self._store.folders(self._folder)  # before the log: a commit after it is no orphan
        unfinished = self._store.unfinished(self._log.prefix)
        self._state = self._log.refresh()
        self._unpin()
        self._supersede()
        self._delete_superseded()
        self._delete_staged(folders)
        self._discard_unfinished(unfinished)
        freed = sum(item.bytes for item in self._items if item.action in (DELETE, DISCARD))
        return SweepReport(run_id=self._log.run_id, dry_run=self._dry_run, items=tuple(self._items), freed_bytes=freed)

    def _unpin(self) -> None:
        pins = {pin.hold_id: pin for pin in self._state.pins}
        for verdict in self._plan(self._state, ()).pins:
            pin = pins[verdict.key]
            if verdict.is_over:
                self._append(partial(unpin_entry, pin, verdict.why))
            self._note(PIN, pin.prefix, UNPIN if verdict.is_over else KEEP, verdict.why, pin=pin)

    def _supersede(self) -> None:
        for verdict in self._plan(self._state, ()).checkpoints:
            if verdict.is_over:
                self._check_own(verdict.key)
                self._append(partial(self._superseding, verdict.key))
            record = self._record(verdict.key)
            is_kept = record.state in (COMMITTED, QUARANTINED)
            # Somebody came to need what was over when this began: the newest state says who.
            why = self._verdict(verdict.key).why if is_kept and verdict.is_over else verdict.why
            self._note(CHECKPOINT, verdict.key, KEEP if is_kept else SUPERSEDE, why, size=record.committed.bytes)

    def _superseding(self, prefix: str, state: RunState) -> CheckpointSuperseded | None:
        """Decide again on the newest state: somebody may hold, resume from or need it by now."""
        verdicts = {verdict.key: verdict for verdict in self._plan(state, ()).checkpoints}
        record = state.find(prefix)
        if record is None or prefix not in verdicts or not verdicts[prefix].is_over or state.is_needed(prefix):
            return None
        return CheckpointSuperseded(why=verdicts[prefix].why, **_identity(record.committed))

    def _verdict(self, prefix: str) -> Verdict:
        verdicts = {verdict.key: verdict for verdict in self._plan(self._state, ()).checkpoints}
        return verdicts[prefix]

    def _delete_superseded(self) -> None:
        for record in self._state.checkpoints:
            if record.state == SUPERSEDED:
                self._delete_checkpoint(record)

    def _delete_checkpoint(self, record: CheckpointRecord) -> None:
        prefix, size = record.committed.prefix, record.committed.bytes
        if self._newest_record(prefix).state != SUPERSEDED:
            return  # another sweep was faster
        self._delete_bytes(prefix)
        body = CheckpointDeleted(bytes=size, **_identity(record.committed))
        self._append(partial(_unless_deleted, body))
        self._note(CHECKPOINT, prefix, DELETE, f"superseded: {record.detail}", size=size)

    def _delete_staged(self, folders: Sequence[str]) -> None:
        just_deleted = {item.key for item in self._items if item.action == DELETE}
        others = [folder for folder in folders if folder not in just_deleted]
        for verdict in self._plan(self._state, others).staged:
            keys = self._store.keys(verdict.key)
            size = sum(self._store.size(key) or 0 for key in keys)
            if verdict.is_over and keys:
                self._delete_bytes(verdict.key)
            if keys:
                self._note(STAGED, verdict.key, DELETE if verdict.is_over else KEEP, verdict.why, size=size)

    def _delete_bytes(self, prefix: str) -> None:
        """Delete everything under the folder, whatever its manifest names, and the manifest last."""
        self._check_own(prefix)
        if self._dry_run:
            return
        keys = self._store.keys(prefix)
        for key in sorted(keys, key=lambda key: (key == f"{prefix}/manifest.json", key)):
            self._store.delete(key)

    def _check_own(self, prefix: str) -> None:
        """Refuse to delete what is no checkpoint's folder of this run, whoever wrote into its log that it is one."""
        if self._checkpoint_folder(f"{prefix}/") != prefix or parse_checkpoint_folder(prefix) is None:
            raise IntegrityError(
                f"{self._log.prefix}/log says that {prefix} is a checkpoint, which is no checkpoint of run "
                f"{self._log.run_id}; nothing more is deleted: find out who wrote that, `cairn log` shows it"
            )

    def _discard_unfinished(self, writes: Sequence[UnfinishedWrite]) -> None:
        folders = sorted({folder for write in writes if (folder := self._checkpoint_folder(write.key))})
        staged = {verdict.key: verdict for verdict in self._plan(self._state, folders).staged}
        for write in writes:
            folder = self._checkpoint_folder(write.key)
            verdict = staged.get(folder or "") or self._stale(write, folder)
            if verdict.is_over and not self._dry_run:
                self._store.discard(write)
            action = DISCARD if verdict.is_over else KEEP
            self._note(UNFINISHED, write.key, action, verdict.why, size=write.bytes)

    def _stale(self, write: UnfinishedWrite, folder: str | None) -> Verdict:
        record = self._state.find(folder) if folder else None
        if record is not None and record.state in (SUPERSEDED, DELETED):
            return Verdict(key=write.key, is_over=True, why=f"its checkpoint is {record.state}")
        is_over = write.age_seconds > STALE_SECONDS
        why = f"nobody has finished it for {write.age_seconds / 3600:.0f} h" if is_over else "may still be written"
        return Verdict(key=write.key, is_over=is_over, why=why)

    def _checkpoint_folder(self, key: str) -> str | None:
        folder, separator, _ = key.removeprefix(f"{self._folder}/").partition("/")
        return f"{self._folder}/{folder}" if separator and key.startswith(f"{self._folder}/") else None

    def _append(self, decide: Callable[[RunState], Any]) -> None:
        if not self._dry_run:
            self._state = self._log.append(decide, writer=self._writer)
        elif (body := decide(self._state)) is not None:
            self._state = fold([imagined_entry(body, self._writer)], self._state)

    def _record(self, prefix: str) -> CheckpointRecord:
        record = self._state.find(prefix)
        assert record is not None  # no entry makes the log forget a checkpoint
        return record

    def _newest_record(self, prefix: str) -> CheckpointRecord:
        if not self._dry_run:
            self._state = self._log.refresh()
        return self._record(prefix)

    def _note(
        self, kind: str, key: str, action: str, why: str, *, size: int = 0, pin: CheckpointPinned | None = None
    ) -> None:
        named = (pin.step, pin.attempt) if pin else parse_checkpoint_folder(self._checkpoint_folder(f"{key}/") or "")
        step, attempt = named or (None, None)
        item = SweepItem(kind=kind, key=key, step=step, attempt=attempt, action=action, why=why, bytes=size)
        self._items.append(item)


def _identity(committed: CheckpointCommitted) -> dict[str, Any]:
    return {name: getattr(committed, name) for name in ("step", "attempt", "prefix", "manifest_sha256")}


def _unless_deleted(body: CheckpointDeleted, state: RunState) -> CheckpointDeleted | None:
    record = state.find(body.prefix)
    return body if record is not None and record.state == SUPERSEDED else None
