"""Continues a run on this machine: `cairn train --run-id …` in a session of its own, which outlives the watcher.

Each child holds a file lock on its run and on one of the machine's places; the kernel releases both when it ends.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cairn.storage.logs.run_log import RunLog

CAIRN = (sys.executable, "-P", "-m", "cairn.cli.command")


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A continuation that was begun, described for people."""

    how: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """No continuation was begun, and why: one is running already, or there is no place."""

    why: str


class Continuation(Protocol):
    """A way to continue a run."""

    def begin(self, log: RunLog, *, silent_seconds: float) -> Begun | Busy:
        """Begin to continue a run unchanged for so long, or return why not; raises if it cannot be begun at all."""
        ...

    def where(self, run_id: str) -> str:
        """Return where a person finds the output of the run's continuations."""
        ...


class ContinuationHere:
    """Continues runs by child processes of this machine, at most `at_most` at a time."""

    def __init__(self, folder: Path, store: str, *, at_most: int, program: Sequence[str] = CAIRN) -> None:
        """Keep locks and outputs in `folder`; the children open `store`."""
        self._folder, self._store, self._at_most, self._program = folder, store, at_most, program
        self._children: list[subprocess.Popen[bytes]] = []

    def begin(self, log: RunLog, *, silent_seconds: float) -> Begun | Busy:
        """Start `cairn train` on the run, unless an earlier child still runs or all places are taken."""
        self._children = [child for child in self._children if child.poll() is None]  # also reaps those that ended
        self._folder.mkdir(parents=True, exist_ok=True)
        with _locked([self._folder / f"{log.run_id}.lock"]) as run:
            if run is None:
                return Busy(why="a process of an earlier poll is continuing it")
            with _locked([self._folder / f"place-{number}.lock" for number in range(self._at_most)]) as place:
                if place is None:
                    return Busy(why=f"{self._at_most} runs are being continued here already; --at-most allows more")
                return self._start(log.run_id, (run, place))

    def where(self, run_id: str) -> str:
        """Return the output file of the run's continuations."""
        return f"output in {self._folder / run_id}.txt"

    def _start(self, run_id: str, locks: tuple[int, ...]) -> Begun:
        command = [*self._program, "train", "--run-id", run_id, "--store", self._store]
        with (self._folder / f"{run_id}.txt").open("ab") as sink:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True, pass_fds=locks
            )
        self._children.append(child)
        return Begun(how=f"process {child.pid}, {self.where(run_id)}")


@contextmanager
def _locked(paths: list[Path]) -> Iterator[int | None]:
    """Yield the descriptor of the first of `paths` that could be locked, or None; a child that inherits it keeps it."""
    for path in paths:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        return
    yield None
