"""The parent's side of an evaluator: start it, bound it, end all of it, know what came of it.

Owns the process group, the time and how much is listened to. Refuses to know what is measured. Whatever the evaluator
started in its group ends with it: a group is killed before its leader is reaped, so no other can have its number.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from tasks.errors import EvaluationInterrupted

EVALUATOR_COMMAND = (sys.executable, "-m", "tasks.evaluator.evaluator")
MOST_STDOUT_BYTES = 8 * 1024 * 1024
_TAIL_BYTES = 64 * 1024
_LOOK_SECONDS = 0.1
_LAST_WORD_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the evaluator printed, or what was wrong with it."""

    result: bytes
    problem: str


class PipeListener:
    """Listens to a pipe in a thread of its own and keeps its first bytes, or its last; the rest is let go."""

    def __init__(
        self, pipe: IO[bytes], *, most_bytes: int, keep_last: bool = False, copy_to: int | None = None
    ) -> None:
        """Start listening; `copy_to` is a file descriptor that is told everything too."""
        self._pipe, self._most_bytes, self._keep_last, self._copy_to = pipe, most_bytes, keep_last, copy_to
        self._kept, self.overflowed = bytearray(), False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def heard(self) -> bytes:
        """Wait for the end of the pipe, a moment at most, and return what was kept."""
        self._thread.join(_LAST_WORD_SECONDS)
        return bytes(self._kept)

    def last_line(self) -> str:
        """Return the last line that says something."""
        lines = self.heard().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "nothing on stderr"

    def _listen(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), 65536):
                self._keep(chunk)
                if self._copy_to is not None:
                    os.write(self._copy_to, chunk)

    def _keep(self, chunk: bytes) -> None:
        self._kept += chunk
        if len(self._kept) > self._most_bytes:
            self.overflowed = True
            if self._keep_last:
                del self._kept[: -self._most_bytes]
            else:
                del self._kept[self._most_bytes :]


def never() -> bool:
    """Say that nobody wants the evaluator to stop."""
    return False


def run_evaluator(
    order: bytes,
    timeout_seconds: float,
    *,
    stopping: Callable[[], bool] = never,
    command: Sequence[str] = EVALUATOR_COMMAND,
) -> Outcome:
    """Run the evaluator process on an order; whatever it does comes back as an outcome.

    Raises `EvaluationInterrupted` once `stopping` says so: that is nobody's failure.
    """
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:  # no memory or no process left, say
        return Outcome(result=b"", problem=f"the evaluator could not be started: {error}")
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    stdout = PipeListener(child.stdout, most_bytes=MOST_STDOUT_BYTES)
    stderr = PipeListener(child.stderr, most_bytes=_TAIL_BYTES, keep_last=True)
    threading.Thread(target=_feed, args=(child.stdin, order), daemon=True).start()
    try:
        problem = _wait(child, stdout, timeout_seconds, stopping)
    finally:
        _end_group(child)
    if not problem and child.returncode != 0:
        problem = f"the evaluator exited with {child.returncode}: {stderr.last_line()}"
    return Outcome(result=b"" if problem else stdout.heard(), problem=problem)


def _feed(pipe: IO[bytes], order: bytes) -> None:
    with suppress(BrokenPipeError), pipe:
        pipe.write(order)


def _wait(
    child: subprocess.Popen[bytes], stdout: PipeListener, timeout_seconds: float, stopping: Callable[[], bool]
) -> str:
    """Wait for the child's end without reaping it; return what is wrong if it has to be ended."""
    deadline = time.monotonic() + timeout_seconds
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if stdout.overflowed:
            return f"the evaluator printed nonsense: more than {MOST_STDOUT_BYTES:,} bytes"
        if stopping():
            raise EvaluationInterrupted("the evaluation was given up: the run has to leave")
        if time.monotonic() >= deadline:
            return f"the evaluator did not answer within {timeout_seconds:g} s"
        time.sleep(_LOOK_SECONDS)
    return ""


def _end_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the latter: nothing but zombies, on some systems
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
