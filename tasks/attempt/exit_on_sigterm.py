"""What SIGTERM means to a command that acts: leave as preempted; once it is leaving, at once and with the code it has.

Owns the handler outside of an attempt; the flow listens by itself while an attempt runs. Refuses to know what the
command does. A command that has said how it ended must not end by the signal: schedulers tell processes to go that are
going already, and would read a refusal or a success as a crash.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tasks.policy.termination import ExitCode


class Terminated(BaseException):
    """SIGTERM came while no attempt was listening: nothing is lost, the command leaves as preempted."""


@contextmanager
def preempted_by_sigterm() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM while the block runs; a second one is not argued with.

    One that comes after the block is not heard until `exit_on_sigterm` knows the code to leave with.
    """
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        # Not SIG_IGN: a child started from here on would inherit it.
        signal.signal(signal.SIGTERM, lambda number, frame: None)


def _leave(number: int, frame: FrameType | None) -> None:
    exit_on_sigterm(ExitCode.PREEMPTED)
    raise Terminated


def exit_on_sigterm(code: int) -> None:
    """Leave at once with `code` when SIGTERM comes, from now on: whatever is still tidied up can be left."""

    def go(number: int, frame: FrameType | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            # A signal may come while the stream itself is being written: what cannot be flushed now is let go.
            try:
                stream.flush()
            except (OSError, RuntimeError, ValueError):
                continue
        os._exit(code)

    signal.signal(signal.SIGTERM, go)
