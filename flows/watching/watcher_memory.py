"""What this machine's watchers have seen of a store's runs, by this boot's clock; losing the file restarts waits."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from storage.errors import IntegrityError
from storage.logs.heartbeat import read_heartbeat
from storage.logs.run_log import RunLog
from storage.stores.document import decode, encode
from tasks.machine.placement import boot_id, is_known_dead, keep_file, shares_pids
from tasks.policy.run_watch import Life, Observed


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """The state of one run when last seen, since when it is unchanged, and what was tried since."""

    attempt: int
    mark: str
    since: float
    futile: int = 0
    tried_at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Remembered:
    boot_id: str
    runs: Mapping[str, Sighting]


class WatcherMemory:
    """The sightings of one store's runs, in a file of this machine's work folder."""

    def __init__(self, path: Path, *, monotonic: Callable[[], float]) -> None:
        """Read the file; one of another boot, or a damaged one, is ignored."""
        self._path, self._monotonic = path, monotonic
        self._runs: dict[str, Sighting] = dict(_read(path))

    def observe(self, log: RunLog) -> Observed:
        """Return what is known of a run whose log was just read."""
        state, now = log.state, self._monotonic()
        mark = _mark(log)
        before = self._runs.get(log.run_id)
        if before is None or before.mark != mark:
            self._runs[log.run_id] = Sighting(attempt=state.latest_attempt, mark=mark, since=now)
        seen = self._runs[log.run_id]
        moved = before is not None and before.mark != mark and before.attempt == state.latest_attempt
        return Observed(
            owner=_life(log),
            unchanged_since=seen.since,
            shows_life=moved and state.open_attempt is not None,
            futile=seen.futile,
            tried_at=seen.tried_at,
        )

    def note_continued(self, run_id: str) -> None:
        """Remember that a continuation of the run was begun."""
        seen = self._runs[run_id]
        self._runs[run_id] = replace(seen, futile=seen.futile + 1, tried_at=self._monotonic())

    def save(self) -> None:
        """Replace the file; a folder that cannot be written costs only the memory."""
        keep_file(self._path, encode(_Remembered(boot_id=boot_id(), runs=self._runs)))


def _read(path: Path) -> Mapping[str, Sighting]:
    try:
        remembered = decode(path.read_bytes(), _Remembered, where=str(path))
    except (OSError, IntegrityError):
        return {}
    return remembered.runs if remembered.boot_id == boot_id() else {}


def _mark(log: RunLog) -> str:
    """Return what changes whenever the run moves: a commit is a sign of life like a heartbeat."""
    state = log.state
    owner = state.open_attempt
    if owner is None:
        return f"ended {state.latest_attempt}" if state.attempts else "opened"
    heartbeat = read_heartbeat(log.store, log.prefix, owner.started.attempt)
    return f"open {owner.started.attempt} committed {owner.last_committed_step} {heartbeat}"


def _life(log: RunLog) -> Life:
    if not log.state.attempts:
        return _life_of_opener(log)
    placement = log.state.attempts[-1].started.placement
    if not shares_pids(placement):
        return Life.UNKNOWN
    return Life.GONE if is_known_dead(placement) else Life.HERE


def _life_of_opener(log: RunLog) -> Life:
    """Judge by the opening entry's host, pid and time; a process that began later only has the same pid."""
    opening = log.read_entries()[0]
    if opening.writer.host != socket.gethostname():
        return Life.UNKNOWN
    try:
        began = psutil.Process(opening.writer.pid).create_time()
    except psutil.NoSuchProcess:
        return Life.GONE
    except psutil.AccessDenied:
        return Life.UNKNOWN
    return Life.GONE if began > opening.at.timestamp() else Life.HERE
