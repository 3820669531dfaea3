"""The run log: the entries of one run, their folded state, and appends that decide again when a race is lost."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from storage.errors import Fenced, StorageError
from storage.logs.entry_log import EntryLog, ReadEntry, utc_now
from storage.logs.fold_cache import FoldCache, FoldedLog
from storage.logs.log_entry import FORMAT_VERSION, Entry, Writer, refuse_old_writer
from storage.logs.run_entries import RUN_KINDS
from storage.logs.run_fold import fold
from storage.logs.run_state import RunState
from storage.stores.object_store import ObjectStore, check_key, check_name

FOLD_EVERY_ENTRIES = 128
"""A run's folded state is cached after so many entries; the cache may be deleted at any time."""


def run_prefix(run_id: str) -> str:
    """Return the folder of a run; raise `StorageError` if the run id is not a plain name."""
    return check_key(f"runs/{check_name('run id', run_id)}")


def run_fold_cache(log: EntryLog, run_id: str) -> FoldCache[RunState]:
    """Return the cached fold of a run."""
    return FoldCache(log=log, folder=run_prefix(run_id), state_type=RunState, fold=fold)


class RunLog:
    """One run's log with its folded state, which only moves forward and is first read by `refresh`. Thread-safe."""

    def __init__(self, store: ObjectStore, run_id: str, *, log: EntryLog | None = None) -> None:
        self.store = store
        self.run_id = run_id
        self.prefix = run_prefix(run_id)
        self._log = log or EntryLog(store=store, prefix=f"{self.prefix}/log", kinds=RUN_KINDS, clock=utc_now)
        self._cache = run_fold_cache(self._log, run_id)
        self._lock = threading.RLock()  # commit, evaluation and flow share one log across threads
        self._head: ReadEntry | None = None
        self._cached_seq = -1
        self.state = RunState()

    @property
    def seq(self) -> int:
        """The number of the newest entry read so far, -1 before the first."""
        return -1 if self._head is None else self._head.entry.seq

    @property
    def folded(self) -> FoldedLog[RunState] | None:
        """The state read so far and the entry it ends with; None before the first entry."""
        return None if self._head is None else FoldedLog(head=self._head, state=self.state)

    @property
    def fold_key(self) -> str:
        """The key of the cached fold."""
        return self._cache.key

    def refresh(self) -> RunState:
        """Read the entries appended since and return the state; the first time, start from the cached fold."""
        with self._lock:
            folded = None
            if self._head is None:  # whatever a sketch of the run said, the log says it again
                self.state, folded = RunState(), self._cache.read()
            if folded is not None and folded.head.entry.resume == folded.state.resume:
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
                    refused = f"run {self.run_id}: every reader would refuse this entry; not written: {body}"
                    raise Fenced(state.closed_to_training() or refused)
                read = self._log.append(body, after=self._head, writer=writer, resume=after.resume)
                if read is not None:
                    self._accept(read)
                    if read.entry.seq - self._cached_seq >= FOLD_EVERY_ENTRIES:
                        with suppress(StorageError):  # the entry is appended; the next writer caches
                            self._cached_seq = read.entry.seq
                            self._cache.write(FoldedLog(head=read, state=self.state))
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
