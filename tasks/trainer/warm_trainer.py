"""Starts trainers ahead of their spec, for their imports take seconds; at most one waits, and none is left behind."""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from cairn.model.estimates.numerics import MachineSpeed
from cairn.storage.stores.child_process import end_child, start_child
from cairn.tasks.errors import TaskError
from cairn.tasks.trainer.trainer_group import TRAINER_COMMAND
from cairn.tasks.trainer.trainer_protocol import SpeedTrial, ThreadTrial, TrialDone, decode_message

IMPORT_SECONDS = 5.0
"""About the time a trainer's imports take; one that waits for longer only uses memory."""
_TRIAL_SECONDS = 60.0


class TrainerChild:
    """A trainer's process, in a group that Ctrl-C does not reach; without a spec it exits when its stdin closes."""

    def __init__(self, work_dir: Path, command: Sequence[str] = TRAINER_COMMAND) -> None:
        """Start it with its stderr in a temporary file of `work_dir`."""
        work_dir.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix="waiting-", suffix=".stderr", dir=work_dir)
        self.stderr_path = Path(name)
        with os.fdopen(descriptor, "wb") as stderr:
            self.process = start_child(command, stderr=stderr)

    def move_stderr(self, path: Path) -> None:
        """Rename the stderr file to `path`, on the same file system."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.stderr_path.replace(path)
        self.stderr_path = path

    def discard(self) -> None:
        """Kill the process and delete its stderr file."""
        end_child(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # it was sent something that it did not read
                if pipe is not None:
                    pipe.close()
        self.stderr_path.unlink(missing_ok=True)


class WarmTrainer:
    """At most one trainer process without a spec."""

    def __init__(self, start: Callable[[Path], TrainerChild] = TrainerChild) -> None:
        self._start, self._command, self._starting = start, TRAINER_COMMAND, threading.Lock()
        self._child: TrainerChild | None = None

    def set_command(self, command: tuple[str, ...]) -> None:
        """Start trainers by this command from now on, and discard one that was started by another."""
        if command != self._command:
            self._command, self._start = command, partial(TrainerChild, command=command)
            self.discard()

    def start(self, work_dir: Path) -> None:
        """Start a trainer with its stderr in `work_dir`, unless a live one waits already."""
        with self._starting:
            if self._child is None or self._child.process.poll() is not None:
                self.discard()
                self._child = self._start(work_dir)

    def time_threads(self, trial: ThreadTrial, work_dir: Path) -> Mapping[int, float]:
        """Have the trainer that waits time steps; returns seconds by number of threads, none if it cannot."""
        answer = self._ask(trial, work_dir)
        return answer.step_seconds if isinstance(answer, TrialDone) else {}

    def measure_speed(self, work_dir: Path) -> MachineSpeed | None:
        """Have the trainer that waits measure this machine; returns None if it cannot."""
        answer = self._ask(SpeedTrial(), work_dir)
        return answer if isinstance(answer, MachineSpeed) else None

    def _ask(self, trial: ThreadTrial | SpeedTrial, work_dir: Path) -> TrialDone | MachineSpeed | None:
        """Return the answer of the trainer that waits; one that gives none is discarded."""
        self.start(work_dir)
        assert self._child is not None
        process = self._child.process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(_TRIAL_SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(trial.model_dump_json().encode() + b"\n")
            process.stdin.flush()
            answer = decode_message(process.stdout.readline())
            if isinstance(answer, TrialDone | MachineSpeed):
                return answer
        except (OSError, TaskError):
            pass
        finally:
            timer.cancel()
        self.discard()
        return None

    def acquire(self, work_dir: Path) -> TrainerChild:
        """Return the trainer that waits, or a new one; the caller owns it from now on."""
        self.start(work_dir)
        child, self._child = self._child, None
        assert child is not None
        return child

    def discard(self) -> None:
        """Kill the trainer that waits, if any."""
        child, self._child = self._child, None
        if child is not None:
            child.discard()


@contextmanager
def warm_trainer() -> Iterator[WarmTrainer]:
    """Yield a `WarmTrainer`; a trainer that was started and not acquired is discarded with the block."""
    warm = WarmTrainer()
    try:
        yield warm
    finally:
        warm.discard()
