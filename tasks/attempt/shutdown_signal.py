"""Shutdown requests to this process: signals and preemption notices during a run, signals outside of one.

SIGTERM announces a preemption, SIGINT comes from a person, SIGHUP from a closed terminal unless ignored (nohup), and
SIGUSR1 or SIGUSR2 from a scheduler where the configuration says so; until that is known they are kept pending.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from cairn.tasks.policy.termination import ExitCode

_OF_SCHEDULERS = (signal.SIGUSR1, signal.SIGUSR2)


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
        scheduled = {signal.Signals[extra_signal]} if extra_signal else set[signal.Signals]()
        numbers = {signal.SIGINT, *_notices(), *scheduled}
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, scheduled)
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
    """A notice came outside of an attempt; the command exits as preempted and nothing is lost."""


@contextmanager
def raise_on_notice() -> Iterator[Callable[[str], None]]:
    """Raise `Terminated` on the first notice in the block, exit 75 on the second; then `exit_on_notice` follows.

    Yields a function that is called with the scheduler's signal, "" for none, once it is known.
    """

    def raise_terminated(number: int, frame: FrameType | None) -> None:
        exit_on_notice(ExitCode.PREEMPTED)
        raise Terminated

    def add(extra_signal: str) -> None:
        if extra_signal:
            signal.signal(signal.Signals[extra_signal], raise_terminated)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_SCHEDULERS)

    for number in _notices():
        signal.signal(number, raise_terminated)
    try:
        yield add
    finally:
        for number in _notices():
            # Not SIG_IGN, which child processes would inherit.
            signal.signal(number, lambda number, frame: None)


def exit_on_notice(code: int) -> None:
    """From now on exit at once with `code` on a notice: a scheduler would read the result of a command as a crash."""

    def exit_now(number: int, frame: FrameType | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            # The signal may interrupt a write to this very stream, which then cannot be flushed.
            try:
                stream.flush()
            except (OSError, RuntimeError, ValueError):
                continue
        os._exit(code)

    for number in _notices():
        signal.signal(number, exit_now)


def expect_notices() -> None:
    """Exit as preempted on a notice, since nothing has begun; keep SIGUSR1 and SIGUSR2 until one is known to be one."""
    exit_on_notice(ExitCode.PREEMPTED)
    signal.pthread_sigmask(signal.SIG_BLOCK, _OF_SCHEDULERS)


def _notices() -> list[signal.Signals]:
    """Return the signals that announce an end; a scheduler's once it has a handler of this module, not a script's."""
    owners = {number: getattr(signal.getsignal(number), "__module__", "") for number in _OF_SCHEDULERS}
    scheduled = [number for number, owner in owners.items() if owner == __name__]
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, *hangup, *scheduled]
