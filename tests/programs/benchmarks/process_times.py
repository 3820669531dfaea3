"""What other processes have used of a core, from outside: Linux's /proc, read without a process of one's own."""

import os
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def children(pid: int) -> Iterator[int]:
    """Yield the processes that `pid` started and that are still there."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        yield from (int(child) for child in _read(f"/proc/{pid}/task/{thread}/children").split())


def command_line(pid: int) -> str:
    """Return the words `pid` was started with, nothing where it has ended."""
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ")


def own_core_seconds(pid: int) -> float:
    """Return what `pid` has used of a core, with those of its children that it has waited for."""
    return _core_seconds(f"/proc/{pid}/stat", fields=4)


def main_thread_core_seconds(pid: int) -> float:
    """Return what the first thread of `pid` has used of a core."""
    return _core_seconds(f"/proc/{pid}/task/{pid}/stat", fields=2)


def tree_core_seconds(pid: int) -> float:
    """Return what `pid` and everything it started have used of a core."""
    return own_core_seconds(pid) + sum(tree_core_seconds(child) for child in children(pid))


def _core_seconds(path: str, *, fields: int) -> float:
    values = _read(path).rpartition(")")[2].split()
    return sum(int(value) for value in values[11 : 11 + fields]) / _TICKS


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
