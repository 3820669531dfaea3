"""Waiting for what another process does, with a time limit that scales with the machine."""

import subprocess
import time
from collections.abc import Callable

from tests.processes.fork_server import start_seconds

_POLL_SECONDS = 0.01
_LEAST_SECONDS, _STARTS = 120.0, 20.0


def patience_seconds() -> float:
    """How long anything may take before it counts as hanging: twenty times the measured start of a process here."""
    return max(_LEAST_SECONDS, _STARTS * start_seconds())


def wait_for(
    is_there: Callable[[], bool],
    process: "subprocess.Popen[bytes]",
    what: str,
    output: Callable[[], str] = lambda: "",
) -> None:
    """Wait for an event of another process; fails if that ends before the event, or if it takes far too long."""
    deadline = time.monotonic() + patience_seconds()
    while not is_there():
        code = process.poll()
        assert code is None or is_there(), f"the process left with {code} before {what}\n{output()}"
        assert time.monotonic() < deadline, f"never saw {what}\n{output()}"
        time.sleep(_POLL_SECONDS)


def wait_until(is_there: Callable[[], bool], what: str) -> None:
    """Wait for an event; fails if it takes far too long."""
    deadline = time.monotonic() + patience_seconds()
    while not is_there():
        assert time.monotonic() < deadline, f"never saw {what}"
        time.sleep(_POLL_SECONDS)
