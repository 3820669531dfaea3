"""How long a job's machines were idle: from an attempt's last step to the next one's first, without Slurm's part."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import read_step_records
from cairn.storage.stores.object_store import ObjectStore

RUNNING = "RUNNING"
_LOOKED_AFTER_SECONDS = 0.5
_IDLE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """A time in which the job was running and the run was not; a start may take what the run's first one took."""

    where: str
    seconds: float
    start_seconds: float = 0.0
    is_between: bool = True

    @property
    def allowed(self) -> float:
        """The longest time that is not too long."""
        return _IDLE_SECONDS + self.start_seconds

    @property
    def is_too_long(self) -> bool:
        """Whether it is longer than that."""
        return self.seconds > self.allowed


class JobStates:
    """The states of a job over time, looked at twice a second."""

    def __init__(self, look: Callable[[], str]) -> None:
        """Begin to look."""
        self._look = look
        self.spans: list[tuple[float, str]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look for the last time."""
        self._stop.set()
        self._thread.join()

    def running_seconds(self, first: float, last: float) -> float:
        """Return how long it was running between two times."""
        ends = [at for at, _ in self.spans[1:]] + [time.time()]
        return sum(
            max(0.0, min(end, last) - max(at, first))
            for (at, state), end in zip(self.spans, ends, strict=True)
            if state == RUNNING
        )

    def left_running(self, after: float) -> float:
        """Return when it was first seen to run no more after a time."""
        return next((at for at, state in self.spans if at > after and state != RUNNING), after)

    def _watch(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(_LOOKED_AFTER_SECONDS)
            with suppress(AssertionError):  # Slurm's controller was busy
                state, now = self._look(), time.time()
                if not self.spans or self.spans[-1][1] != state:
                    self.spans.append((now, state))


def idle_times(store: ObjectStore, run_id: str, state: RunState, states: JobStates) -> tuple[Idle, ...]:
    """Return the idle times between the attempts of a run, and from its end to that of its job."""
    at: dict[int, list[float]] = {}
    for record in read_step_records(store, f"runs/{run_id}", state.attempts):
        if record.at is not None:
            at.setdefault(record.attempt, []).append(record.at.timestamp())
    trained = sorted(at)
    if not trained:
        return ()
    start = round(states.running_seconds(0.0, min(at[trained[0]])), 1)
    between = [
        Idle(
            where=f"between attempts {before} and {after}",
            seconds=round(states.running_seconds(max(at[before]), min(at[after])), 1),
            start_seconds=start,
        )
        for before, after in pairwise(trained)
    ]
    if state.finished is None:
        return tuple(between)
    return (*between, _at_the_end(store, run_id, states, start))


def _at_the_end(store: ObjectStore, run_id: str, states: JobStates, start_seconds: float) -> Idle:
    """What follows the run's end is its last evaluation, the promotion and the sweep; then both machines leave."""
    finished = next(entry.at for entry in RunLog(store, run_id).read_entries() if entry.kind == "run-finished")
    ended = finished.timestamp()
    return Idle(
        where="after the run's end",
        seconds=round(states.left_running(ended) - ended, 1),
        start_seconds=start_seconds,
        is_between=False,
    )
