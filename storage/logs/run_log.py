"""The run log: the entries of one run, their folded state, and appends that decide again when a race is lost."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from storage.errors import Fenced, IntegrityError, ObjectMissing, StorageError
from storage.logs.entry_log import EntryLog, ReadEntry, utc_now
from storage.logs.log_entry import FORMAT_VERSION, Entry, Writer, refuse_old_writer
from storage.logs.run_entries import RUN_KINDS
from storage.logs.run_state import RunState, fold
from storage.stores.document import decode, encode, sha256
from storage.stores.object_store import ObjectStore, check_key

FOLD_VERSION = 3
FOLD_EVERY_ENTRIES = 128
"""A run's folded state is cached after so many entries; the cache may be deleted at any time."""


def run_prefix(run_id: str) -> str:
    """Return the folder of a run; raise `StorageError` if the run id is not a plain name."""
    if "@" in run_id:
        rule = "must not contain '@', which stands between run and step in RUN@STEP"
        raise StorageError(f"run id {run_id!r}: {rule}; name the run without a step, or choose another run id")
    return check_key(f"runs/{run_id}")


def list_run_ids(store: ObjectStore) -> list[str]:
    """Return the ids of the store's runs, sorted."""
    folders = (key for key in store.folders("runs") if "@" not in key)  # no run's: another program's
    return [key.split("/")[1] for key in folders if store.first(f"{key}/log") is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedLog:
    """The state of a run after the entry `head`."""

    head: ReadEntry
    state: RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class _Label:
    version: int
    seq: int
    entry_sha256: str
    state_sha256: str


def write_fold(store: ObjectStore, key: str, folded: FoldedLog) -> None:
    """Write the cache: a label in one line, then the state."""
    state = encode(folded.state)
    label = _Label(
        version=FOLD_VERSION, seq=folded.head.entry.seq, entry_sha256=folded.head.sha256, state_sha256=sha256(state)
    )
    store.write(key, encode(label).replace(b"\n", b"") + b"\n" + state)


def read_fold(store: ObjectStore, key: str, log: EntryLog) -> FoldedLog | None:
    """Return the cached state, or None if there is none or its version, bytes, entry or `resume` do not match.

    Raises `IntegrityError` if the log ends before the cached entry: entries were deleted.
    """
    try:
        line, _, state_bytes = store.read(key).partition(b"\n")
        label = decode(line, _Label, where=key)
        if label.version != FOLD_VERSION or sha256(state_bytes) != label.state_sha256:
            return None
        state = decode(state_bytes, RunState, where=key)
    except (ObjectMissing, IntegrityError):
        return None
    head = log.read(label.seq)
    if head is None:
        raise IntegrityError(
            f"{log.prefix}: ends before seq {label.seq}, which {key} was folded from: entries were deleted; restore "
            f"them, or delete {key} to accept the loss"
        )
    trusted = head.sha256 == label.entry_sha256 and head.entry.resume == state.resume
    return FoldedLog(head=head, state=state) if trusted else None


class RunLog:
    """One run's log with its folded state, which only moves forward and is first read by `refresh`. Thread-safe."""

    def __init__(self, store: ObjectStore, run_id: str, *, log: EntryLog | None = None) -> None:
        self.store = store
        self.run_id = run_id
        self.prefix = run_prefix(run_id)
        self._log = log or EntryLog(store=store, prefix=f"{self.prefix}/log", kinds=RUN_KINDS, clock=utc_now)
        self._lock = threading.RLock()  # commit, evaluation and flow share one log across threads
        self._head: ReadEntry | None = None
        self._cached_seq = -1
        self.state = RunState()

    @property
    def seq(self) -> int:
        """The number of the newest entry read so far, -1 before the first."""
        return -1 if self._head is None else self._head.entry.seq

    @property
    def folded(self) -> FoldedLog | None:
        """The state read so far and the entry it ends with; None before the first entry."""
        return None if self._head is None else FoldedLog(head=self._head, state=self.state)

    @property
    def fold_key(self) -> str:
        """The key of the cached fold."""
        return f"{self.prefix}/fold.json"

    def refresh(self) -> RunState:
        """Read the entries appended since and return the state; the first time, start from the cached fold."""
        with self._lock:
            if self._head is None and (folded := read_fold(self.store, self.fold_key, self._log)):
                self._head, self.state, self._cached_seq = folded.head, folded.state, folded.head.entry.seq
            for read in self._log.read_after(self._head):
                self._accept(read)
            return self.state

    def read_entries(self) -> tuple[Entry, ...]:
        """Read and check every entry again, whatever is cached; oldest first."""
        return tuple(read.entry for read in self._log.read_after(None))

    def append(self, decide: Callable[[RunState], Any], *, writer: Writer) -> RunState:
        """Append the body that `decide` returns for the newest state, and call it again each time a race is lost.

        `decide` may return None to append nothing, and may raise. Raises `Fenced` when the writer's attempt no longer
        owns the run or the fold would refuse the body, `AppendUnknown` when the outcome could not be established.
        """
        with self._lock:
            while True:
                state = self.refresh()
                refuse_old_writer(state.closed_to_writers(), f"run {self.run_id}")
                if state.fences(writer.attempt):
                    by = f"is fenced by attempt {state.latest_attempt}"
                    if state.latest_attempt == writer.attempt:
                        by = "was ended by another process; it commits nothing more"
                    raise Fenced(f"run {self.run_id}: attempt {writer.attempt} {by}")
                body = decide(state)
                if body is None:
                    return state
                after = fold([imagined_entry(body, writer)], state)
                if len(after.refused) > len(state.refused):
                    raise Fenced(f"run {self.run_id}: every reader would refuse this entry; not written: {body}")
                read = self._log.append(body, after=self._head, writer=writer, resume=after.resume)
                if read is not None:
                    self._accept(read)
                    if read.entry.seq - self._cached_seq >= FOLD_EVERY_ENTRIES:
                        with suppress(StorageError):  # the entry is appended; the next writer caches
                            write_fold(self.store, self.fold_key, FoldedLog(head=read, state=self.state))
                            self._cached_seq = read.entry.seq
                    return self.state

    def _accept(self, read: ReadEntry) -> None:
        self._head = read
        self.state = fold([read.entry], self.state)


def imagined_entry(body: Any, writer: Writer) -> Entry:
    """Return an entry that is folded to see the state after it and never appended."""
    return Entry(
        version=FORMAT_VERSION,
        seq=-1,
        kind="",
        at=utc_now(),
        write_id="",
        prev=None,
        writer=writer,
        resume=(),
        body=body,
    )
