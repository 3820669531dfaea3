"""Where the threads of a process that hangs stand: a forked process of a test writes its stacks when asked by a signal.

They go to a file in memory that only this module reads, so nothing of a test's own files changes.
"""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

SIGNAL = signal.SIGRTMIN + 7
_NAME = "stacks-of-a-test"
_WRITING_SECONDS = 1.0


def listen() -> None:
    """Have this process write the stacks of all its threads whenever it gets `SIGNAL`."""
    faulthandler.register(SIGNAL, file=os.memfd_create(_NAME), all_threads=True)


def stacks_of(pid: int) -> str:
    """Return the stacks of a process and all that descend from it, of those that listen."""
    with suppress(psutil.NoSuchProcess):
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        files = {process.pid: file for process in family for file in _files(process.pid)}
        for asked in files:
            os.kill(asked, SIGNAL)
        time.sleep(_WRITING_SECONDS)  # a process that hangs in C answers no other way
        return "\n".join(f"process {asked}:\n{_read(file)}" for asked, file in files.items())
    return ""


def _files(pid: int) -> list[Path]:
    with suppress(OSError):
        return [file for file in Path(f"/proc/{pid}/fd").iterdir() if _NAME in os.readlink(file)]
    return []


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"ended meanwhile: {error}"
