"""Waiting for what another process does, with a time limit that scales with the machine."""

import subprocess
import sys
import time
from collections.abc import Callable

from tests.processes.stacks import stacks_of
from tests.session_folder import once

_POLL_SECONDS = 0.01


def patience_seconds() -> float:
    """How long anything may take before it counts as hanging: a multiple of a start of Python, measured here."""
    return max(240.0, 400.0 * start_seconds())


def prompt_seconds() -> float:
    """How long something may take that nothing but a slow machine can delay: measured now, since loads come and go."""
    return max(60.0, 200.0 * start_seconds(), 200.0 * float(_measure_start()))


def start_seconds() -> float:
    """How long a start of Python takes on this machine, measured once a session."""
    return float(once("start-seconds", _measure_start))


def _measure_start() -> str:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import asyncio, json, subprocess"], check=True)
    return str(time.monotonic() - began)


def wait_for(
    is_there: Callable[[], bool],
    process: "subprocess.Popen[bytes]",
    what: str,
    output: Callable[[], str] = lambda: "",
) -> None:
    """Wait for an event of another process; fails if that ends before the event, or if it takes far too long."""

    def is_there_or_process_ended() -> bool:
        if is_there():
            return True
        code = process.poll()
        assert code is None or is_there(), f"the process left with {code} before {what}\n{output()}"
        return code is not None

    wait_until(is_there_or_process_ended, what, lambda: f"{output()}\n{stacks_of(process.pid)}")


def wait_until(is_there: Callable[[], bool], what: str, output: Callable[[], str] = lambda: "") -> None:
    """Wait for an event; fails if it takes far too long."""
    deadline = time.monotonic() + patience_seconds()
    while not is_there():
        assert time.monotonic() < deadline, f"never saw {what}\n{output()}"
        time.sleep(_POLL_SECONDS)
