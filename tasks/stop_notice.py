"""Notices that this process has to leave: SIGTERM (preemption) and SIGINT (a person).

Owns the signal handlers while a run is trained, and the first signal's name. Refuses to stop anything itself.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_HEARD = (signal.SIGTERM, signal.SIGINT)


class StopNotice:
    """Remembers the first notice and calls those who want to know at once."""

    def __init__(self) -> None:
        """Start with no notice."""
        self._signal: str | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def signal(self) -> str | None:
        """Name of the first signal received, or None."""
        return self._signal

    def give(self, name: str) -> None:
        """Record a notice and tell every listener, each time it comes."""
        self._signal = self._signal or name
        for listener in list(self._listeners):
            listener()

    @contextmanager
    def told(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` at every notice while the block runs, and at once if there was one before."""
        self._listeners.append(listener)
        try:
            if self._signal is not None:
                listener()
            yield
        finally:
            self._listeners.remove(listener)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Receive signals while the block runs; outside the main thread there is nothing to receive."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _HEARD}
        for number in _HEARD:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.give(signal.Signals(number).name)
