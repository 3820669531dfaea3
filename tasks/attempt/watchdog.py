"""When silence means that a child hangs: measured against its own history, not a fixed number.

Owns the rule and the thread that asks. Refuses to kill anything. Time in which the watch itself did not run (a
suspended machine, a stopped parent) is nobody's silence, and neither is time in which the child waits to be asked.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tasks.configuration.settings import WatchdogConfig

_REMEMBERED_GAPS = 64
_FEWEST_GAPS = 4
_LATE_SHARE = 0.25
"""A watch that woke up later than this share of the allowance has slept through too much to accuse anybody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatGap:
    """How long a child has said nothing, and how long its history allows."""

    seconds: float
    allowed_seconds: float


def allowed_seconds(gaps: Sequence[float], config: WatchdogConfig) -> float:
    """Return how long a child may be silent after these gaps between its signs of life (seconds, oldest first)."""
    recent = gaps[-_REMEMBERED_GAPS:]
    if len(recent) < _FEWEST_GAPS:
        return config.startup_seconds
    return max(config.floor_seconds, config.factor * max(recent))


class HangDetector:
    """The signs of life of one child, and the verdict on its silence; safe to use from several threads."""

    def __init__(self, config: WatchdogConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to expect a first sign now."""
        self._config, self._clock = config, clock
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED_GAPS)
        self._since = clock()
        self._ticked: tuple[float, float] | None = None
        self._has_spoken = False
        self._resting = False
        self._lock = threading.Lock()

    def sign(self) -> None:
        """Note a sign of life."""
        with self._lock:
            now = self._clock()
            if self._has_spoken and not self._resting and not self._overslept(now):
                self._gaps.append(now - self._since)
            self._since, self._has_spoken = now, True

    def rest(self) -> None:
        """Expect nothing from now on: the child waits for us."""
        with self._lock:
            self._resting = True

    def expect(self) -> None:
        """Expect signs again, counted from now: the child was asked for something."""
        with self._lock:
            self._resting, self._since = False, self._clock()

    def tick(self, poll_seconds: float) -> None:
        """Note that the watch itself is awake; a tick long after its time gives the child a fresh allowance."""
        with self._lock:
            now = self._clock()
            if self._overslept(now):
                self._since = now
            self._ticked = (now, poll_seconds)

    def silence(self) -> HeartbeatGap:
        """Return how long nothing was heard, in seconds, and how long that may last."""
        with self._lock:
            seconds = 0.0 if self._resting else self._clock() - self._since
            return HeartbeatGap(seconds=seconds, allowed_seconds=self._allowed_seconds())

    def silent_seconds(self) -> float:
        """Return how long nothing was heard."""
        return self.silence().seconds

    def overdue(self) -> bool:
        """Whether the silence has lasted longer than it may."""
        silence = self.silence()
        return silence.seconds > silence.allowed_seconds

    def _allowed_seconds(self) -> float:
        return allowed_seconds(tuple(self._gaps), self._config)

    def _overslept(self, now: float) -> bool:
        if self._ticked is None:
            return False
        before, poll_seconds = self._ticked
        return now - before > poll_seconds + _LATE_SHARE * self._allowed_seconds()


@contextmanager
def watching(
    watch: HangDetector, on_overdue: Callable[[HeartbeatGap], None], *, poll_seconds: float = 1.0
) -> Iterator[None]:
    """Ask every `poll_seconds` while the block runs; at the first overdue silence call `on_overdue`, once."""
    stop = threading.Event()

    def ask() -> None:
        watch.tick(poll_seconds)
        while not stop.wait(poll_seconds):
            watch.tick(poll_seconds)
            silence = watch.silence()
            if silence.seconds > silence.allowed_seconds:
                on_overdue(silence)
                return

    thread = threading.Thread(target=ask, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
