"""The parent's side of a trainer: start it, send its spec and commands, receive its events, and know how it exited.

Its imports take seconds, so it is started ahead of its spec; at most one waits, and none is left behind.
"""

import operator
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cairn.model.estimates.numerics import MachineSpeed
from cairn.storage.logs import run_entries, run_members, step_log
from cairn.storage.stores.child_process import ORDER_SECONDS, end_child, start_child
from cairn.tasks.attempt.watchdog import HangDetector
from cairn.tasks.errors import CheckpointLost, TaskError, TrainerGone
from cairn.tasks.policy.failures import ExceptionReport, describe_exception
from cairn.tasks.trainer import trainer_group, trainer_protocol

T = TypeVar("T")
Staged = run_entries.StagedCheckpoint | trainer_protocol.CheckpointDropped
_TAIL_BYTES = 64 * 1024  # a library may write gigabytes of warnings
_EXIT_SECONDS = 30.0
"""A large process dies slowly: it may write a core dump, and the kernel unmaps its memory."""
IMPORT_SECONDS = 5.0
"""About the time a trainer's imports take; one that waits for longer only uses memory."""
_TRIAL_SECONDS, _HUNG_SECONDS = 60.0, 10.0
_STACKS_POLLS, _STACKS_POLL_SECONDS, _STACK_LINES = 20, 0.1, 40


class TrainerChild:
    """A trainer's process, in a group that Ctrl-C does not reach; without a spec it exits when its stdin closes."""

    def __init__(self, work_dir: Path, command: Sequence[str] = trainer_group.TRAINER_COMMAND) -> None:
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
    """At most one trainer process without a spec; `close` ends it if it was not acquired.

    `is_of_set` says that runs follow each other: the next one's trainer imports beside the evaluations of this one.
    """

    def __init__(self, start: Callable[[Path], TrainerChild] = TrainerChild, *, is_of_set: bool = False) -> None:
        self.is_of_set = is_of_set
        self._start, self._command, self._starting = start, trainer_group.TRAINER_COMMAND, threading.Lock()
        self._child: TrainerChild | None = None
        self._started = 0.0

    def set_command(self, command: tuple[str, ...]) -> None:
        """Start trainers by this command from now on, and discard one that was started by another."""
        if command != self._command:
            self._command, self._start = command, partial(TrainerChild, command=command)
            self.close()

    def start(self, work_dir: Path) -> None:
        """Start a trainer with its stderr in `work_dir`, unless a live one waits already, not so long that it exits."""
        with self._starting:
            is_old = time.monotonic() - self._started > ORDER_SECONDS / 2
            if self._child is None or is_old or self._child.process.poll() is not None:
                self.close()
                self._child, self._started = self._start(work_dir), time.monotonic()

    def measure_speed(self, work_dir: Path) -> MachineSpeed | None:
        """Have the trainer that waits measure this machine; returns None and discards it if it cannot."""
        self.start(work_dir)
        assert self._child is not None
        process = self._child.process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(_TRIAL_SECONDS, process.kill)
        timer.start()
        answer = None
        with suppress(OSError, TaskError):
            process.stdin.write(trainer_protocol.SpeedTrial().model_dump_json().encode() + b"\n")
            process.stdin.flush()
            answer = trainer_protocol.decode_message(process.stdout.readline())
        timer.cancel()
        if isinstance(answer, MachineSpeed):
            return answer
        self.close()
        return None

    def acquire(self, work_dir: Path) -> TrainerChild:
        """Return the trainer that waits, or a new one; the caller owns it from now on."""
        self.start(work_dir)
        child, self._child = self._child, None
        assert child is not None
        return child

    def close(self) -> None:
        """Kill the trainer that waits, if any."""
        child, self._child = self._child, None
        if child is not None:
            child.discard()


class ReceivedEvents:
    """The newest events that a trainer has sent; safe to use from several threads.

    `segments` counts the segments that ended, `staged` has the checkpoints that nobody has taken yet, or what became of
    them; `outcome` is the newest of these since the last command. `outlived` has all ranks that others outlive.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._newest: dict[type, Any] = {}
        self.segments = 0
        self.staged: dict[int, Staged] = {}
        self.outcome: Staged | None = None
        self.outlived = list[trainer_protocol.RanksOutlived]()

    def add(self, event: trainer_protocol.Command | trainer_protocol.Event) -> None:
        """Keep an event and wake those who wait."""
        with self._changed:
            self.segments += isinstance(event, trainer_protocol.SegmentDone)
            if isinstance(event, Staged):
                self.outcome = self.staged[event.step] = event
            elif isinstance(event, trainer_protocol.RanksOutlived):
                self.outlived.append(event)
            elif not isinstance(event, ExceptionReport) or not self.newest(ExceptionReport):
                self._newest[type(event)] = event  # of several ranks, the first report has the cause
            self._changed.notify_all()

    def newest(self, kind: type[T]) -> T | None:
        """Return the newest event of this kind, or None before the first; of exceptions, the first."""
        return self._newest.get(kind)

    def close(self) -> None:
        """End every wait: no more events will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, find: Callable[[], T | None], limit_seconds: float | None = None) -> T | None:
        """Wait until `find` returns something and return it, or None once no more events will come, or it is late."""
        with self._changed:
            self._changed.wait_for(lambda: find() is not None or self._closed, limit_seconds)
            return find()


class TrainerProcess:
    """A running trainer and the events it has sent."""

    def __init__(
        self,
        spec: trainer_protocol.TrainerSpec,
        child: TrainerChild,
        *,
        on_step: Callable[[step_log.StepRecord], None],
        on_waiting: Callable[[trainer_protocol.Waiting], None],
        detector: HangDetector,
        on_changed: Callable[[run_members.MembersChanged], None] = lambda change: None,
        on_outlived: Callable[[trainer_protocol.RanksOutlived], None] = lambda outlived: None,
    ) -> None:
        """Send `child` its spec; a thread calls what begins with `on_`; `detector` records events."""
        self._spec, self._child, self._detector = spec, child.process, detector
        self._handle: Mapping[type, Callable[[Any], None]] = {
            trainer_protocol.StepDone: lambda done: on_step(done.record),
            trainer_protocol.Waiting: on_waiting,
            run_members.MembersChanged: on_changed,
            trainer_protocol.RanksOutlived: on_outlived,
        }
        child.move_stderr(spec.work_dir / f"attempt-{spec.attempt:04d}.stderr")
        self._stderr_path = child.stderr_path
        self.received = ReceivedEvents()
        self._listener = threading.Thread(target=self._listen, name=f"trainer-{spec.attempt}", daemon=True)
        self._listener.start()
        self._write(spec.model_dump_json().encode() + b"\n")

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child still runs."""
        return self._child.poll() is None

    def wait_ready(self) -> trainer_protocol.Ready:
        """Wait until the child has loaded its state; raises `TrainerGone` if it exits before."""
        return self._wait(lambda: self.received.newest(trainer_protocol.Ready))

    def wait_listening(self) -> int:
        """Wait for the port where the ranks of several machines meet; raises `TrainerGone` if it exits before."""
        return self._wait(lambda: self.received.newest(trainer_protocol.Listening)).port

    def train(self, step: int, *, stall_seconds: float | None = None) -> trainer_protocol.SegmentDone:
        """Have the child train until `step`, see `TrainUntil`; raises `TrainerGone` if it exits before."""
        received, before = self.received, self.received.segments
        self._detector.resume()
        received.outcome = None
        command = trainer_protocol.TrainUntil(step=step, stall_seconds=stall_seconds)
        self._write(trainer_protocol.encode_message(command))
        return self._wait(lambda: received.newest(trainer_protocol.SegmentDone) if received.segments > before else None)

    def wait_staged(self, step: int) -> run_entries.StagedCheckpoint:
        """Wait until the checkpoint of `step` is staged and take it; raises `CheckpointLost`, or `TrainerGone`."""
        staged: object = self._wait(lambda: self.received.staged.get(step))
        self.received.staged.pop(step, None)
        if isinstance(staged, run_entries.StagedCheckpoint):
            return staged
        assert isinstance(staged, trainer_protocol.CheckpointDropped)
        raise CheckpointLost(f"no checkpoint of step {step}: {staged.why}")

    def is_dropped(self, step: int) -> bool:
        """Wait until the checkpoint of `step`, the newest, is staged or never will be; return whether it will not."""
        received = self.received
        outcome = self._wait(lambda: received.outcome if received.outcome and received.outcome.step == step else None)
        return isinstance(outcome, trainer_protocol.CheckpointDropped)

    def notify(self, number: int) -> None:
        """Send the child a signal, unless it has exited."""
        if self.is_alive:
            self._child.send_signal(number)

    def finish(self, limit_seconds: float) -> None:
        """Have the child exit, because everything is committed; it is killed if it has not done so in this time."""
        with suppress(TrainerGone):
            self._write(trainer_protocol.encode_message(trainer_protocol.Finish()))
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(limit_seconds)
        self.kill()

    def write_stacks(self, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Have every rank of this machine write its threads' stacks to its stderr; returns when they stand there.

        A process that the kernel holds writes nothing, so the wait is limited.
        """
        before = grown = self._stderr_bytes()
        self.notify(trainer_group.STACKS_SIGNAL)
        for _ in range(_STACKS_POLLS):
            sleep(_STACKS_POLL_SECONDS)
            last, grown = grown, self._stderr_bytes()
            if grown == last and all(map(operator.gt, grown, before)):
                return

    def end_hung_ranks(self, *, limit_seconds: float = _HUNG_SECONDS) -> bool:
        """Have the launchers kill the ranks for which the others wait, if these can go on; return whether they do."""
        outlived = self.received.outlived
        before = len(outlived)
        self.notify(trainer_group.HUNG_SIGNAL)
        answers = partial(filter, lambda one: one.machine is None)  # which is no machine that is lost meanwhile
        answer = self.received.wait(lambda: next(answers(outlived[before:]), None), limit_seconds)
        return bool(answer and answer.ranks)

    def stacks(self) -> tuple[str, ...]:
        """Return the last lines of each rank's stderr, where `write_stacks` put the stacks; the main thread's last."""
        paths = sorted((self._rank_files() or {0: self._stderr_path}).items())
        return tuple(line for rank, path in paths for line in (f"rank {rank}:", *tail_of(path, _STACK_LINES)))

    def kill(self) -> int:
        """Kill the child's group, unless it has exited; return its exit code, negative for a signal.

        Of several ranks, the code is that of the rank that ended them all.
        """
        code = end_child(self._child)
        self._listener.join()
        ended = self.received.newest(trainer_protocol.RankEnded)
        return ended.exit_code if ended else code

    def reap(self) -> int:
        """Return the exit code as `kill` does; a child that sends no more events gets 30 s to exit by itself."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_EXIT_SECONDS)
        return self.kill()

    def stderr_tail(self) -> tuple[str, ...]:
        """Return the last lines of the child's stderr; of several ranks, of the one that ended them all."""
        ended, spec = self.received.newest(trainer_protocol.RankEnded), self._spec
        own = tail_of(trainer_group.rank_stderr(spec.work_dir, spec.attempt, ended.rank)) if ended else ()
        return own or tail_of(self._stderr_path)

    def _rank_files(self) -> dict[int, Path]:
        any_rank = trainer_group.rank_stderr(self._spec.work_dir, self._spec.attempt, "*")
        return {int(path.name.split("-")[-1].split(".")[0]): path for path in any_rank.parent.glob(any_rank.name)}

    def _stderr_bytes(self) -> list[int]:
        return [path.stat().st_size for path in self._rank_files().values() or (self._stderr_path,)]

    def _write(self, data: bytes) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(data)
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise TrainerGone(f"attempt {self._spec.attempt}: the trainer is gone") from error

    def _wait(self, find: Callable[[], T | None]) -> T:
        if (found := self.received.wait(find)) is None:
            raise TrainerGone(f"attempt {self._spec.attempt}: the trainer ended before it answered")
        return found

    def _listen(self) -> None:
        assert self._child.stdout is not None
        try:
            for line in self._child.stdout:
                if not line.endswith(b"\n"):
                    break  # the child was killed while it wrote
                event = trainer_protocol.decode_message(line)
                self._detector.record_heartbeat()
                if isinstance(event, trainer_protocol.SegmentDone):
                    self._detector.pause()
                self.received.add(event)
                if handle := self._handle.get(type(event)):
                    handle(event)
        except Exception as error:  # no thread reads the child's events any more: it ends with this as its reason
            self.received.add(describe_exception(error))
            end_child(self._child)
        finally:
            self.received.close()  # no other thread may wait for ever


def tail_of(path: Path, lines: int = 20) -> tuple[str, ...]:
    """Return the last `lines` lines of a text file's last 64 KiB, or nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ()
