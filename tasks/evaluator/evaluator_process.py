"""Runs an evaluator process from its parent's side: its time and output are limited.

Its whole group is killed before its leader is reaped, so that no other process can have taken its number.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from cairn.storage.stores.child_process import child_command, end_child, start_child
from cairn.tasks.errors import EvaluationInterrupted

EVALUATOR_COMMAND = child_command("cairn.tasks.evaluator.evaluator")
MOST_STDOUT_BYTES = 8 * 1024 * 1024
_TAIL_BYTES = 64 * 1024
_SHORT_BYTES = 64
_POLL_SECONDS = 0.1
_DRAIN_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The evaluator's output, or its problem; `refused`: it was not started."""

    result: bytes
    problem: str
    refused: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """An evaluator's measurements: losses in nats per token, the text after each prompt; and its command's boundary.

    `losses` are those metrics that are means over held-out windows of `window_tokens`, window by window.
    """

    metrics: dict[str, float]
    samples: tuple[str, ...] = ()
    boundary: str = ""
    window_tokens: int = 0
    losses: dict[str, tuple[float, ...]] = field(default_factory=dict)


class PipeReader:
    """Reads a pipe in a thread of its own and keeps its last bytes; `overflowed` once there were more."""

    def __init__(self, pipe: IO[bytes], *, last_bytes: int = _TAIL_BYTES, copy_to: int | None = None) -> None:
        """Start reading; `copy_to` is a file descriptor that gets a copy of everything."""
        self._pipe, self._last_bytes, self._copy_to = pipe, last_bytes, copy_to
        self._kept, self.overflowed = bytearray(), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def read(self) -> bytes:
        """Wait up to 5 s for the end of the pipe and return what was kept."""
        self._thread.join(_DRAIN_SECONDS)
        return bytes(self._kept)

    def last_line(self) -> str:
        """Return the last line that is not blank."""
        lines = self.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "nothing on stderr"

    def newest_line(self) -> bytes:
        """Return the last whole line so far, if it is short."""
        return bytes(self._kept[-_SHORT_BYTES:]).rpartition(b"\n")[0].rpartition(b"\n")[2]

    def _run(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), 65536):
                self._kept += chunk
                self.overflowed |= len(self._kept) > self._last_bytes
                self._kept = self._kept[-self._last_bytes :]
                if self._copy_to is not None:
                    os.write(self._copy_to, chunk)


def run_evaluator(
    spec: bytes,
    timeout_seconds: float,
    *,
    stopping: Callable[[], bool] = lambda: False,
    note: Callable[[float], object] = lambda share: None,
    command: Sequence[str] = EVALUATOR_COMMAND,
) -> Outcome:
    """Return the outcome of an evaluator with an encoded spec, failed or not; `EvaluationInterrupted` if `stopping`.

    The result is its last line; `note` gets the numbers that it prints before, its share of the work done.
    """
    try:
        with tempfile.TemporaryFile() as stdin:
            stdin.write(spec)
            stdin.seek(0)
            child = start_child(command, stdin=stdin)
    except OSError as error:  # for example no memory or no process left
        return Outcome(result=b"", problem=f"the evaluator could not be started: {error}")
    assert child.stdout is not None and child.stderr is not None
    stdout, stderr = PipeReader(child.stdout, last_bytes=MOST_STDOUT_BYTES), PipeReader(child.stderr)
    problem, deadline = "", time.monotonic() + timeout_seconds
    try:  # without reaping it
        while not problem and os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if stdout.overflowed:
                problem = f"the evaluator printed nonsense: more than {MOST_STDOUT_BYTES:,} bytes"
            elif stopping():
                raise EvaluationInterrupted("the evaluation was interrupted because the run is leaving")
            elif time.monotonic() >= deadline:
                problem = f"the evaluator did not answer within {timeout_seconds:g} s"
            else:
                with suppress(ValueError):
                    note(float(stdout.newest_line()))
                time.sleep(_POLL_SECONDS)
    finally:
        end_child(child)
    if not problem and child.returncode != 0:
        problem = f"the evaluator exited with {child.returncode}: {stderr.last_line()}"
    return Outcome(result=b"" if problem else stdout.read().rstrip().rpartition(b"\n")[2], problem=problem)
