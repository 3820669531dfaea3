"""The trainer's channel to its parent: commands on stdin, events on stdout.

The process exits at once when its parent is gone.
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


class Channel(Protocol):
    """Where a trainer sends its events, alone or as one of several ranks."""

    def send(self, event: Event) -> None:
        """Send an event to the parent."""


class ParentChannel:
    """The channel of a single trainer process; `send` is safe to use from several threads."""

    def __init__(self) -> None:
        """Take stdout for events; anything else printed from now on goes to stderr."""
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._commands: queue.Queue[Command] = queue.Queue()

    def read_spec(self) -> TrainerSpec:
        """Wait for the spec, then read commands in the background; exits if stdin ends before."""
        line = sys.stdin.buffer.readline()
        if not line:
            os._exit(ORPHANED_EXIT_CODE)  # started ahead for a run that did not begin
        spec = TrainerSpec.model_validate_json(line)
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()
        return spec

    def next_command(self) -> Command:
        """Wait for the parent's next command."""
        return self._commands.get()

    def send(self, event: Event) -> None:
        """Send an event; exits if the parent is gone."""
        try:
            with self._lock:
                self._out.write(encode_message(event))
        except BrokenPipeError:
            os._exit(ORPHANED_EXIT_CODE)

    def _read_commands(self) -> None:
        for line in sys.stdin.buffer:
            message = decode_message(line)
            if isinstance(message, TrainUntil | Finish):
                self._commands.put(message)
        os._exit(ORPHANED_EXIT_CODE)


def report_and_exit(channel: Channel, error: BaseException) -> NoReturn:
    """Send the exception to the parent and exit with 1 at once, whatever other threads do."""
    trace = traceback.format_exception(error)
    sys.stderr.write("".join(trace))
    sys.stderr.flush()
    channel.send(
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
