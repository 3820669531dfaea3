"""The trainer's line to its parent: commands in over stdin, events out over stdout, and its last words.

Owns the bytes on both. Refuses to know what is trained. A parent that is gone ends this process at once.
"""

import os
import queue
import sys
import threading
import traceback
from typing import NoReturn, Protocol

from tasks.policy.failures import ORPHANED_EXIT_CODE, ExceptionReport
from tasks.trainer.trainer_protocol import (
    Command,
    Event,
    Finish,
    TrainerSpec,
    TrainUntil,
    decode_message,
    encode_message,
)


class Line(Protocol):
    """What a trainer asks of its line, alone or as one of several ranks."""

    def order(self) -> TrainerSpec:
        """Wait for the order."""

    def next_command(self) -> Command:
        """Wait for the next command."""

    def send(self, event: Event) -> None:
        """Tell the parent."""


class ParentChannel:
    """The line to the parent: commands in, events out, one lock so that two threads never mix their bytes."""

    def __init__(self) -> None:
        """Take stdout for events; anything else printed from now on goes to stderr."""
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._commands: queue.Queue[Command] = queue.Queue()

    def order(self) -> TrainerSpec:
        """Read the order, then listen for commands in the background; without an order there is nothing to do."""
        said = sys.stdin.buffer.readline()
        if not said:
            os._exit(ORPHANED_EXIT_CODE)  # started ahead of a run that did not begin
        order = TrainerSpec.model_validate_json(said)
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        return order

    def next_command(self) -> Command:
        """Wait for the parent's next command."""
        return self._commands.get()

    def send(self, event: Event) -> None:
        """Tell the parent; a parent that is gone ends this process."""
        try:
            with self._lock:
                self._out.write(encode_message(event))
        except BrokenPipeError:
            os._exit(ORPHANED_EXIT_CODE)

    def _listen(self) -> None:
        for line in sys.stdin.buffer:
            message = decode_message(line)
            if isinstance(message, TrainUntil | Finish):
                self._commands.put(message)
        os._exit(ORPHANED_EXIT_CODE)


def die(line: Line, error: BaseException) -> NoReturn:
    """Speak the last words and leave at once, whatever other threads do."""
    trace = traceback.format_exception(error)
    sys.stderr.write("".join(trace))
    sys.stderr.flush()
    line.send(
        ExceptionReport(
            exception=type(error).__name__,
            message=str(error),
            traceback=tuple(trace),
            step=getattr(error, "step", None),
            windows=tuple(getattr(error, "windows", ())),
            spike_step=getattr(error, "spike_step", None),
        )
    )
    os._exit(1)
