"""Detection of a hanging child process by the gaps between its heartbeats, compared with its own history."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from cairn.tasks.configuration.settings import WatchdogConfig
from cairn.tasks.machine.process_scopes import running_beside

_RECENT_GAPS = 64
_LATE_SHARE = 0.25
"""A poll that is later than this share of the allowance restarts it: the watcher itself was suspended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatGap:
    """Time since the last heartbeat, and the time that the child's history allows."""

    seconds: float
    allowed_seconds: float

    @property
    def is_overdue(self) -> bool:
        """Whether the child counts as hanging."""
        return self.seconds > self.allowed_seconds


def allowed_seconds(gaps: Iterable[float], config: WatchdogConfig) -> float:
    """Return the longest gap allowed after these gaps between heartbeats (seconds, oldest first)."""
    recent = tuple(gaps)[-_RECENT_GAPS:]
    return config.startup_seconds if len(recent) < 4 else max(config.floor_seconds, config.factor * max(recent))


class HangDetector:
    """Measures the gap since one child's heartbeat, without suspensions and waits for a command; thread-safe."""

    def __init__(self, config: WatchdogConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._gaps: deque[float] = deque(maxlen=_RECENT_GAPS)
        self._since = clock()
        self._last_poll: tuple[float, float] | None = None
        self._has_heartbeat = False
        self._is_paused = False
        self._lock = threading.Lock()

    def record_heartbeat(self) -> None:
        """Record a heartbeat, and the gap before it."""
        with self._lock:
            now = self._clock()
            if self._has_heartbeat and not self._is_paused and not self._was_suspended(now):
                self._gaps.append(now - self._since)
            self._since, self._has_heartbeat = now, True

    def pause(self) -> None:
        """Expect no heartbeats, because the child waits for a command."""
        with self._lock:
            self._is_paused = True

    def resume(self) -> None:
        """Expect heartbeats again, counted from now."""
        with self._lock:
            self._is_paused, self._since = False, self._clock()

    def record_poll(self, poll_seconds: float) -> None:
        """Record that the watcher is awake; a poll that comes much too late restarts the child's allowance."""
        with self._lock:
            now = self._clock()
            if self._was_suspended(now):
                self._since = now
            self._last_poll = (now, poll_seconds)

    def heartbeat_gap(self) -> HeartbeatGap:
        """Return the current gap; 0 seconds while paused."""
        with self._lock:
            seconds = 0.0 if self._is_paused else self._clock() - self._since
            return HeartbeatGap(seconds=seconds, allowed_seconds=allowed_seconds(self._gaps, self._config))

    def _was_suspended(self, now: float) -> bool:
        before, poll_seconds = self._last_poll or (now, 0.0)
        return now - before > poll_seconds + _LATE_SHARE * allowed_seconds(self._gaps, self._config)


def detecting_hangs(
    detector: HangDetector, on_hang: Callable[[HeartbeatGap], bool | None], *, poll_seconds: float = 1.0
) -> AbstractContextManager[None]:
    """Poll the detector while the block runs; at an overdue gap call `on_hang`, again only if it says that it goes on.

    The child has the time of its history again then.
    """

    def poll(stop: threading.Event) -> None:
        detector.record_poll(poll_seconds)
        while not stop.wait(poll_seconds):
            detector.record_poll(poll_seconds)
            gap = detector.heartbeat_gap()
            if gap.is_overdue:
                if not on_hang(gap):
                    return
                detector.resume()

    return running_beside(poll, name="watchdog")
