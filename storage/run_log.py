"""The run log: entries of one run, folded, appended to by deciding on everything that precedes.

Owns the loop "read all, decide, append right after, else read again and decide again", and fencing before the PUT.
Refuses to know why anything is decided.
"""

import threading
from collections.abc import Callable
from typing import Any

from storage.entry_log import EntryLog, ReadEntry, utc_now
from storage.errors import Fenced
from storage.log_entry import Entry, Writer
from storage.object_store import ObjectStore, checked_key
from storage.run_entries import RUN_KINDS
from storage.run_state import RunState, fold


def run_prefix(run_id: str) -> str:
    """Return the folder of a run; raises `StorageError` for a run id that is no plain name."""
    return checked_key(f"runs/{run_id}")


def list_run_ids(store: ObjectStore) -> list[str]:
    """Return the ids of all runs of the store, sorted."""
    return sorted({key.split("/")[1] for key in store.keys("runs") if key.split("/")[2:3] == ["log"]})


class RunLog:
    """One run's log with its folded state; re-reading only ever moves forward."""

    def __init__(self, store: ObjectStore, run_id: str, *, log: EntryLog | None = None) -> None:
        """Open the log of `run_id`; nothing is read yet."""
        self.store = store
        self.run_id = run_id
        self.prefix = run_prefix(run_id)
        self._log = log or EntryLog(store=store, prefix=f"{self.prefix}/log", kinds=RUN_KINDS, clock=utc_now)
        self._lock = threading.RLock()  # commit, evaluation and flow share one log across threads
        self._head: ReadEntry | None = None
        self._entries: list[Entry] = []
        self.state = RunState()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries read so far, oldest first."""
        return tuple(self._entries)

    def refresh(self) -> RunState:
        """Read what was appended since and return the state after it."""
        with self._lock:
            for read in self._log.read_after(self._head):
                self._accept(read)
            return self.state

    def append(self, decide: Callable[[RunState], Any], *, writer: Writer) -> RunState:
        """Append what `decide` returns for the newest state; decide again whenever somebody was faster.

        `decide` returns a body, or None to append nothing, and may raise. Raises `Fenced` when the writer's attempt no
        longer owns the run or the fold would refuse the body, `AppendUnknown` when the outcome could not be
        established.
        """
        with self._lock:
            return self._append(decide, writer)

    def _append(self, decide: Callable[[RunState], Any], writer: Writer) -> RunState:
        while True:
            state = self.refresh()
            if state.fences(writer.attempt):
                raise Fenced(self._fenced_message(writer, state))
            body = decide(state)
            if body is None:
                return state
            after = fold([_preview(body, writer)], state)
            if len(after.refused) > len(state.refused):
                raise Fenced(
                    f"run {self.run_id}: every reader would refuse this entry now, so it is not written: {body}"
                )
            read = self._log.append(body, after=self._head, writer=writer, resume=after.resume)
            if read is not None:
                self._accept(read)
                return self.state

    def _accept(self, read: ReadEntry) -> None:
        self._head = read
        self._entries.append(read.entry)
        self.state = fold([read.entry], self.state)

    def _fenced_message(self, writer: Writer, state: RunState) -> str:
        if state.latest_attempt == writer.attempt:
            return f"run {self.run_id}: attempt {writer.attempt} was ended by somebody else; it commits nothing more"
        return f"run {self.run_id}: attempt {writer.attempt} is fenced by attempt {state.latest_attempt}"


def _preview(body: Any, writer: Writer) -> Entry:
    return Entry(seq=-1, kind="", at=utc_now(), write_id="", prev=None, writer=writer, resume=(), body=body)
