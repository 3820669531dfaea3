"""The one way to run a child process of Cairn's: its command, its environment, and its end, also with its parent.

A child runs this module first (`python -P -m`), so that it ends even with a parent that died during its imports.
"""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
Stream = int | IO[bytes] | None
_PARENT = "CAIRN_PARENT_PID"
_POLL_SECONDS = 0.5
_SET_DEATH_SIGNAL = 1


def child_command(module: str, *arguments: object) -> tuple[str, ...]:
    """Return the command that runs a module as a child; it imports nothing of the working folder."""
    return (sys.executable, "-P", "-m", "cairn.storage.stores.child_process", module, *map(str, arguments))


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child, in which it finds its parent."""
    return {**environment, _PARENT: str(os.getpid())}


def start_child(
    command: Sequence[str],
    *,
    stdin: Stream = PIPE,
    stdout: Stream = PIPE,
    stderr: Stream = PIPE,
    environment: Mapping[str, str] | None = None,
    own_group: bool = True,
) -> "subprocess.Popen[bytes]":
    """Start a child, in a group of its own, which Ctrl-C in a terminal does not reach; raises OSError if it cannot."""
    variables = child_environment(os.environ if environment is None else environment)
    return subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=stderr, env=variables, start_new_session=own_group
    )


def end_child(child: "subprocess.Popen[bytes]") -> int:
    """Kill a child and the group that it leads, unless it was reaped, and return its exit code."""
    if child.returncode is None:  # not reaped: no other process can have its number
        with suppress(ProcessLookupError, PermissionError):  # the latter: only zombies are left, on some systems
            os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def die_with_starting_thread() -> None:
    """Have the kernel kill this process as soon as the thread that started it has ended: prctl(2), on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def watch_parent() -> None:
    """Poll in a thread whether the parent still runs; once it has ended, kill this process and the group it leads."""
    parent_pid = int(os.environ.pop(_PARENT, os.getppid()))

    def poll() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_POLL_SECONDS)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=poll, name="parent", daemon=True).start()


def main() -> None:
    """Run the module that the first argument names, for as long as the parent runs."""
    watch_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
