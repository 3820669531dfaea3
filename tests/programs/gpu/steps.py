"""Runs one step of the GPU check: a process in a group of its own, heard line by line, killed at its time limit."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from tests.programs.gpu.results import CUT_OFF, DONE, Outcome
from tests.programs.gpu.rows import STEP_SECONDS, Row, heard

ROOT = Path(__file__).parents[3]
_LAST_WORDS = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command, what it is called, and the seconds it may take; `environment` beside that of this process.

    A `measures` step judges nothing: at its limit it is cut off, and what it has found by then is kept.
    """

    part: str
    name: str
    words: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    measures: bool = False


def run_step(step: Step, *, seconds: float, log: IO[str]) -> Outcome:
    """Return what the step found before its end, or before it was killed; everything it said goes to `log`."""
    begun, rows, last, limit = time.monotonic(), list[Row](), list[str](), {STEP_SECONDS: str(seconds)}
    child = subprocess.Popen(
        step.words,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": _import_path(),
            "PYTHONUNBUFFERED": "1",
            **step.environment,
            **limit,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    listener = threading.Thread(target=_listen, args=(child.stdout, rows, last, log), daemon=True)
    listener.start()
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=seconds)
        status = child.poll()
    finally:  # also where a person interrupts
        _kill(child)
    listener.join(5.0)
    if status is None:
        ended = CUT_OFF if step.measures else f"killed at its limit of {seconds:.0f} s"
    else:
        ended = f"exit status {status}: {''.join(last)[:_LAST_WORDS]}" if status else DONE
    return Outcome(part=step.part, step=step.name, ended=ended, seconds=time.monotonic() - begun, rows=tuple(rows))


def _kill(child: "subprocess.Popen[str]") -> None:
    """End a step with all that it started, in groups of their own too: the next one needs the device's memory."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(child.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _listen(pipe: IO[str] | None, rows: list[Row], last: list[str], log: IO[str]) -> None:
    assert pipe is not None
    with pipe:
        for line in pipe:
            log.write(line)
            log.flush()
            row = heard(line)
            if row is not None:
                rows.append(row)
            elif line.strip():
                last[:] = [line.strip()]


def _import_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
