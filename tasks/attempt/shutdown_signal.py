"""Shutdown requests to this process: signals and preemption notices during a run, SIGTERM outside of one.

SIGTERM announces a preemption, SIGINT comes from a person, SIGHUP from a closed terminal unless ignored (nohup).
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from cairn.tasks.policy.termination import ExitCode


class ShutdownSignal:
    """Stores the first shutdown request and calls the registered callbacks at every request."""

    def __init__(self) -> None:
        self._first: tuple[str, str] | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def signal(self) -> str | None:
        """Name of the first request: a signal's name or its source's, or None."""
        return self._first[0] if self._first else None

    @property
    def detail(self) -> str:
        """A sentence about the first request; empty for a bare signal or without a request."""
        return self._first[1] if self._first else ""

    def request(self, name: str, detail: str = "") -> None:
        """Record a request if it is the first, and call every callback."""
        # One assignment and no lock, because a signal handler may interrupt this very line.
        self._first = self._first or (name, detail)
        for callback in list(self._callbacks):
            callback()

    @contextmanager
    def on_shutdown(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` at every request while the block runs, and at once if there was one before."""
        self._callbacks.append(callback)
        try:
            if self._first is not None:
                callback()
            yield
        finally:
            self._callbacks.remove(callback)

    @contextmanager
    def listening(self, extra_signal: str = "") -> Iterator[None]:
        """Handle signals, and `extra_signal` such as SIGUSR1, while the block runs; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        numbers = {signal.SIGTERM, signal.SIGINT, *hangup, *((signal.Signals[extra_signal],) if extra_signal else ())}
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        details = {"SIGTERM": "", "SIGINT": "", "SIGHUP": "the terminal was closed (nohup or a deployment outlives it)"}
        scheduled = f"the scheduler announced with {name} that this machine will be taken away"
        self.request(name, details.get(name, scheduled))


class Terminated(BaseException):
    """SIGTERM came outside of an attempt; the command exits as preempted and nothing is lost."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise `Terminated` on the first SIGTERM in the block, exit 75 on the second; then `exit_on_sigterm` follows."""

    def raise_terminated(number: int, frame: FrameType | None) -> None:
        exit_on_sigterm(ExitCode.PREEMPTED)
        raise Terminated

    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        # Not SIG_IGN, which child processes would inherit.
        signal.signal(signal.SIGTERM, lambda number, frame: None)


def exit_on_sigterm(code: int) -> None:
    """From now on exit at once with `code` on SIGTERM: a scheduler would read the result of a command as a crash."""

    def exit_now(number: int, frame: FrameType | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            # The signal may interrupt a write to this very stream, which then cannot be flushed.
            try:
                stream.flush()
            except (OSError, RuntimeError, ValueError):
                continue
        os._exit(code)

    signal.signal(signal.SIGTERM, exit_now)
