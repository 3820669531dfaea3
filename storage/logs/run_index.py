"""An index of a store's runs as a watcher last saw them: a cache, which may be stale, damaged or missing.

One request says whether a run has moved since. Of the runs that are over, each refresh asks only some, in turn.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeVar

from cairn.storage.errors import IntegrityError, StorageError
from cairn.storage.logs import fold_cache, log_entry, run_log, run_state
from cairn.storage.stores import codec, object_store

INDEX_FOLDER = "index/runs"
RUNS_IN_OBJECT = 500
"""Runs in one object of the index, which stays far below what is read of a document."""
ASKED_OVER_RUNS = 40
"""Runs that are over and are asked in one refresh whether they went on."""
MOST_LOGS = 1_000
"""Logs that are kept in memory, some 30 kB each."""
_VERSION = 2
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sketch:
    """A run up to entry `seq`: its newest attempt, checkpoint, evaluation; without configuration if it `is_over`."""

    seq: int
    state: run_state.RunState
    is_over: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    version: int
    turn: int
    runs: Mapping[str, Sketch]


class RunIndex:
    """The index of one store; nothing is read before `refresh`."""

    def __init__(self, store: object_store.ObjectStore) -> None:
        self._store, self._runs, self._turn = store, dict[str, Sketch](), 0
        self._asked, self._listed, self._is_local = frozenset[str](), list[str](), False
        self._logs = dict[str, run_log.RunLog]()

    def refresh(self) -> list[str]:
        """Read the index, and return the names of the store's run folders, sorted; a folder may be without a log."""
        stored, self._is_local = list[_Stored](), self._store.local_path(INDEX_FOLDER) is not None
        with suppress(StorageError):
            self._listed = self._store.keys(INDEX_FOLDER)
        for key in self._listed:
            with suppress(StorageError):
                stored.append(codec.decode(self._store.read(key), _Stored, where=key, hook=fold_cache.decode_history))
        if stored := [part for part in stored if part.version == _VERSION]:
            self._turn = max(part.turn for part in stored)
            self._runs = {run_id: sketch for part in stored for run_id, sketch in part.runs.items()}
        run_ids = list_folders(self._store)
        self._runs = {run_id: self._runs[run_id] for run_id in run_ids if run_id in self._runs}
        over = [run_id for run_id, sketch in self._runs.items() if sketch.is_over]
        first = self._turn * ASKED_OVER_RUNS % max(len(over), 1)
        self._asked = frozenset((*over, *over)[first : first + ASKED_OVER_RUNS])
        return run_ids

    def read_all(
        self,
        read: Callable[[run_log.RunLog], Item],
        unreadable: Callable[[str, str], Item],
        *,
        known: Mapping[str, Item] = {},
    ) -> list[tuple[str, Item]]:
        """Return every run that has a log, with what `read` makes of it, or `unreadable` of why it does not verify.

        A run that is `known` is taken as it is, and its log not asked.
        """
        run_ids = self.refresh()

        def read_one(run_id: str) -> Item | None:
            if run_id in known:
                return known[run_id]
            try:
                log = self.read(run_id)
                return None if is_empty(log) else read(log)
            except IntegrityError as error:
                return unreadable(run_id, str(error))

        found = zip(run_ids, object_store.ask_each(self._store, read_one, run_ids), strict=True)
        return [(run_id, item) for run_id, item in found if item is not None]

    def read(self, run_id: str) -> run_log.RunLog:
        """Return a run's log: with the state of its sketch and `head` None if it has not moved, else refreshed."""
        log = self._logs.pop(run_id, None)
        if log is None:
            log, sketch = run_log.RunLog(self._store, run_id), self._runs.get(run_id)
            if sketch is not None and self._is_current(log, sketch):
                log.state = sketch.state
                return log
        return self.fold(log)

    def fold(self, log: run_log.RunLog) -> run_log.RunLog:
        """Refresh a log and keep it: the next read of the run costs only its new entries."""
        log.refresh()
        if len(self._logs) < MOST_LOGS:
            self._logs[log.run_id] = log
        return log

    def forget(self, log: run_log.RunLog) -> None:
        """Keep only the sketch of a run that is over."""
        self.note(log, is_over=True)
        self._logs.pop(log.run_id, None)

    def note(self, log: run_log.RunLog, *, is_over: bool) -> None:
        """Remember a run as it is in a log that was read."""
        before = self._runs.get(log.run_id)
        seq = before.seq if before is not None and log.head is None else log.seq
        if not is_empty(log) and (before is None or (before.seq, before.is_over) != (seq, is_over)):
            self._runs[log.run_id] = Sketch(seq=seq, state=_sketch(log.state, is_over), is_over=is_over)

    def is_over(self, log: run_log.RunLog) -> bool:
        """Whether the log has the state of its sketch, and that says that nothing is left to do."""
        return log.head is None and log.run_id in self._runs and self._runs[log.run_id].is_over

    def save(self) -> None:
        """Write the index; a store that refuses it costs later refreshes their requests, and nothing else."""
        sketches, written = sorted(self._runs.items()), list[str]()
        with suppress(StorageError):
            for number, first in enumerate(range(0, len(sketches), RUNS_IN_OBJECT)):
                runs = dict(sketches[first : first + RUNS_IN_OBJECT])
                stored = _Stored(version=_VERSION, turn=self._turn + 1, runs=runs)
                written.append(f"{INDEX_FOLDER}/{number:05d}.json")
                self._store.write(written[-1], codec.encode(stored, hook=fold_cache.encode_history))
            for key in set(self._listed) - set(written):
                self._store.delete(key)

    def _is_current(self, log: run_log.RunLog, sketch: Sketch) -> bool:
        """Whether the log still ends with the sketch's entry; a log that was replaced by a shorter one does not."""
        folder = f"{log.prefix}/log"
        if sketch.is_over and log.run_id not in self._asked:
            return True
        if not self._is_local:
            return self._store.first(folder) == f"{folder}/{log_entry.entry_name(sketch.seq)}"
        sizes = [self._store.size(f"{folder}/{log_entry.entry_name(seq)}") for seq in (sketch.seq, sketch.seq + 1)]
        return sizes[0] is not None and sizes[1] is None


def list_run_ids(store: object_store.ObjectStore) -> list[str]:
    """Return the ids of the store's runs, sorted."""

    def has_log(run_id: str) -> bool:
        folder = f"{run_log.run_prefix(run_id)}/log"
        if store.local_path(folder) is not None and store.size(f"{folder}/{log_entry.entry_name(0)}") is not None:
            return True  # a local disk lists a whole log for its first name
        return store.first(folder) is not None

    found = list_folders(store)
    return list(compress(found, object_store.ask_each(store, has_log, found)))


def is_empty(log: run_log.RunLog) -> bool:
    """Whether a log that was read has no entry, or only those of forks that were never opened."""
    if log.state.opened is not None or log.state.attempts:
        return False
    return log.head is None or bool(log.state.abandoned_pins)


def list_folders(store: object_store.ObjectStore) -> list[str]:
    """Return the names of the run folders, sorted; one may be without a log."""
    return [key.split("/")[1] for key in store.folders("runs") if "@" not in key]  # no run's: another program's


def _sketch(state: run_state.RunState, is_over: bool) -> run_state.RunState:
    live = (state.readable or state.live_checkpoints)[:1]
    sketch = run_state.RunState(
        opened=state.opened,
        opened_at=state.opened_at,
        attempts=fold_cache.History(state.attempts[-1:]),
        live_checkpoints=tuple(replace(record, evaluations=()) for record in live),
        finished=state.finished,
        high_water_step=state.high_water_step,
        deleted=state.deleted,
        deleted_at=state.deleted_at,
    )
    if not is_over:
        recorded, failed = fold_cache.History(state.evaluations[-1:]), fold_cache.History(state.failed_evaluations[-1:])
        return replace(sketch, evaluations=recorded, failed_evaluations=failed)
    last = state.attempts[-1]
    ended = replace(last.ended, stderr_tail=(), evidence={}) if last.ended else None
    last = replace(last, started=replace(last.started, config={}), ended=ended)
    opened = replace(state.opened, config={}) if state.opened else None
    return replace(sketch, opened=opened, attempts=fold_cache.History([last]))
