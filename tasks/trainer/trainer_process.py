"""The parent's side of a trainer at work: give it its order, speak with it, know how it ended.

Owns what is said and its evidence; the process is a `TrainerChild`, which may have waited for this order. Refuses to
decide anything.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from storage.checkpoints.checkpoint import StagedCheckpoint
from storage.logs.step_log import StepRecord
from tasks.attempt.watchdog import HangDetector
from tasks.errors import TrainerGone
from tasks.policy.failures import ExceptionReport
from tasks.trainer.trainer_child import TrainerChild
from tasks.trainer.trainer_group import rank_stderr
from tasks.trainer.trainer_protocol import (
    Command,
    Event,
    Finish,
    RankEnded,
    Ready,
    SegmentDone,
    StepDone,
    TrainerSpec,
    TrainUntil,
    Waiting,
    decode_message,
    encode_message,
)

_STDERR_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024  # a library may complain for gigabytes


class TrainerProcess:
    """A running trainer and everything it has said so far."""

    def __init__(
        self,
        order: TrainerSpec,
        child: TrainerChild,
        *,
        on_step: Callable[[StepRecord], None],
        on_waiting: Callable[[Waiting], None],
        watch: HangDetector,
    ) -> None:
        """Send `child` its order; `on_step` and `on_waiting` are called from the listening thread.

        `watch` is told of every sign of life, and when none is expected.
        """
        self.attempt = order.attempt
        self._on_step, self._on_waiting, self._watch = on_step, on_waiting, watch
        child.keep_stderr(order.work_dir / f"attempt-{order.attempt:04d}.stderr")
        self.stderr_path, self._child = child.stderr_path, child.process
        self._changed = threading.Condition()
        self._ready: Ready | None = None
        self.segments: list[SegmentDone] = []
        self._staged: dict[int, StagedCheckpoint] = {}
        self._gone = False
        self.last_step: StepDone | None = None
        self.last_words: ExceptionReport | None = None
        self._rank_ended: RankEnded | None = None
        self._order = order
        self._listener = threading.Thread(target=self._listen, name=f"trainer-{order.attempt}", daemon=True)
        self._listener.start()
        self._write(order.model_dump_json().encode() + b"\n")

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child still runs."""
        return self._child.poll() is None

    def wait_ready(self) -> Ready:
        """Wait until the child has loaded its state; raise `TrainerGone` if it ends before."""
        self._wait(lambda: self._ready is not None)
        assert self._ready is not None
        return self._ready

    def train_until(self, step: int) -> SegmentDone:
        """Have the child train until `step` and wait for it; raise `TrainerGone` if it ends before."""
        answered = len(self.segments)
        self._watch.resume()
        self._send(TrainUntil(step=step))
        self._wait(lambda: len(self.segments) > answered)
        return self.segments[answered]

    def wait_staged(self, step: int) -> StagedCheckpoint:
        """Wait until the checkpoint of `step` is staged; raise `TrainerGone` if the child ends before."""
        self._wait(lambda: step in self._staged)
        return self._staged[step]

    def notify(self, number: int) -> None:
        """Send the child a signal; a child that is gone is no error."""
        if self._child.poll() is None:
            self._child.send_signal(number)

    def finish(self) -> int:
        """Tell the child to leave, and wait for its exit code."""
        with suppress(TrainerGone):
            self._send(Finish())
        return self.reap()

    def kill(self) -> int:
        """End the child's whole process group now, and return the exit code."""
        if self._child.poll() is None:
            os.killpg(self._child.pid, 9)
        return self.reap()

    def reap(self) -> int:
        """Wait for the child's end and return its exit code (negative: the signal that killed it)."""
        code = self._child.wait()
        self._listener.join()
        return self._rank_ended.exit_code if self._rank_ended else code

    def stderr_tail(self) -> tuple[str, ...]:
        """Return the last lines the child wrote to stderr; of several ranks, the one that ended them all."""
        ended, order = self._rank_ended, self._order
        own = tail_of(rank_stderr(order.work_dir, order.attempt, ended.rank)) if ended else ()
        return own or tail_of(self.stderr_path)

    def _send(self, command: Command) -> None:
        self._write(encode_message(command))

    def _write(self, data: bytes) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(data)
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise TrainerGone(f"attempt {self.attempt}: the trainer is gone") from error

    def _wait(self, is_there: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: is_there() or self._gone)
            if not is_there():
                raise TrainerGone(f"attempt {self.attempt}: the trainer ended before it answered")

    def _listen(self) -> None:
        assert self._child.stdout is not None
        try:
            for line in self._child.stdout:
                self._hear(decode_message(line))
        finally:
            # Whatever ended the listening, nobody may wait for an answer any longer.
            with self._changed:
                self._gone = True
                self._changed.notify_all()

    def _hear(self, event: Command | Event) -> None:
        self._watch.record_heartbeat()
        with self._changed:
            self._take(event)
            self._changed.notify_all()
        if isinstance(event, StepDone):
            self._on_step(event.record)
        elif isinstance(event, Waiting):
            self._on_waiting(event)

    def _take(self, event: Command | Event) -> None:
        match event:
            case Ready():
                self._ready = event
            case StepDone():
                self.last_step = event
            case SegmentDone():
                self.segments.append(event)
                self._watch.pause()
            case StagedCheckpoint():
                self._staged[event.step] = event
            case ExceptionReport() if self.last_words is None:  # of several ranks, the first report has the cause
                self.last_words = event
            case RankEnded():
                self._rank_ended = event
            case _:
                pass


def tail_of(path: Path, lines: int = _STDERR_TAIL_LINES) -> tuple[str, ...]:
    """Return the last `lines` lines of a text file, as far as 64 KiB hold them, or nothing where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ()
