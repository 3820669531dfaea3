"""Notices that this process has to leave: SIGTERM and others announce a preemption, SIGINT is a person.

SIGHUP says that the terminal is gone, by a closed window or a lost connection: the same good order, unless whoever
started the process has it ignored, as nohup does.

Owns the signal handlers while a run is trained, and the first notice's name and words. Refuses to stop anything itself.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_HEARD = (signal.SIGTERM, signal.SIGINT)
_CLOSED = "the terminal was closed (nohup or a deployment outlives it)"


class ShutdownSignal:
    """Remembers the first notice and calls those who want to know at once."""

    def __init__(self) -> None:
        """Start with no notice."""
        self._first: tuple[str, str] | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def signal(self) -> str | None:
        """Name of the first notice, a signal's or its source's, or None."""
        return self._first[0] if self._first else None

    @property
    def detail(self) -> str:
        """What the first notice said, a sentence for people; empty where it was a bare signal or there was none."""
        return self._first[1] if self._first else ""

    def give(self, name: str, detail: str = "") -> None:
        """Record a notice and tell every listener, each time it comes."""
        # One assignment, no lock: a signal handler may interrupt this very line.
        self._first = self._first or (name, detail)
        for listener in list(self._listeners):
            listener()

    @contextmanager
    def told(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` at every notice while the block runs, and at once if there was one before."""
        self._listeners.append(listener)
        try:
            if self._first is not None:
                listener()
            yield
        finally:
            self._listeners.remove(listener)

    @contextmanager
    def heard(self, extra_signal: str = "") -> Iterator[None]:
        """Receive signals while the block runs; outside the main thread there is nothing to receive.

        `extra_signal` names one more that a scheduler sends ahead, such as SIGUSR1.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        numbers = {*_HEARD, *hangup, *((signal.Signals[extra_signal],) if extra_signal else ())}
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        told = {signal.SIGTERM: "", signal.SIGINT: "", signal.SIGHUP: _CLOSED}
        scheduled = f"the scheduler announced with {name} that this machine will be taken away"
        self.give(name, told.get(signal.Signals(number), scheduled))
