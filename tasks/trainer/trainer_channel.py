"""The trainer's channel to its parent: commands on stdin, events on stdout; and where several ranks find each other.

Where several ranks train one model, rank 0 talks to the parent and the others to rank 0. Spec and commands reach every
rank; of the events, only an `ExceptionReport` comes from any rank. The ranks of one machine meet in a folder, those of
several in a signed connection to the first machine's launcher: nothing else listens, and nothing reads pickles.
"""

import os
import queue
import select
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from cairn.model.estimates.utilization import measure_machine
from cairn.model.training import determinism, parallel
from cairn.model.training.membership import NOWHERE
from cairn.storage.stores.child_process import ORDER_SECONDS
from cairn.tasks.policy import failures
from cairn.tasks.trainer import trainer_group, trainer_protocol
from cairn.tasks.trainer.rank_store import Rendezvous

_SPEC, _EXCEPTION, _EXCEPTION_SENT = "spec", "exception", "exception-sent"
_EXCEPTION_SECONDS = 5.0
_IDLE_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process among those that train one model: its device, the ranks and, if several, their rendezvous."""

    device: torch.device
    ranks: parallel.Ranks = parallel.SINGLE_RANK
    rendezvous: Rendezvous | None = None


class ParentChannel:
    """The channel of a single trainer process; `send` is safe to use from several threads."""

    def __init__(self) -> None:
        """Take stdout for events; anything else printed from now on goes to stderr."""
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._commands: queue.Queue[trainer_protocol.Command | trainer_protocol.Event] = queue.Queue()

    def read_spec(self) -> trainer_protocol.TrainerSpec:
        """Wait for the spec, then read commands in the background; exits if stdin ends or stays silent before."""
        while select.select([sys.stdin.buffer], [], [], ORDER_SECONDS)[0] and (line := sys.stdin.buffer.readline()):
            match trainer_protocol.FIRST_LINES.validate_json(line):
                case trainer_protocol.SpeedTrial():
                    self.send(measure_machine())
                case spec:
                    threading.Thread(target=self._read_commands, name="commands", daemon=True).start()
                    return spec
        os._exit(failures.ORPHANED_EXIT_CODE)  # started ahead for a run that did not begin

    def join(self, spec: trainer_protocol.TrainerSpec) -> Place:
        """Return the place of the only process."""
        return Place(device=determinism.resolve_device(spec.training.device))

    def next_command(
        self, *, meanwhile: Callable[[], None] = lambda: None
    ) -> trainer_protocol.Command | trainer_protocol.Event:
        """Wait for the parent's next command; calls `meanwhile` every 50 ms."""
        while True:
            with suppress(queue.Empty):
                return self._commands.get(timeout=_IDLE_SECONDS)
            meanwhile()

    def send(self, event: trainer_protocol.Event) -> None:
        """Send an event; exits if the parent is gone."""
        try:
            with self._lock:
                self._out.write(trainer_protocol.encode_message(event))
        except BrokenPipeError:
            os._exit(failures.ORPHANED_EXIT_CODE)

    def _read_commands(self) -> None:
        for line in sys.stdin.buffer:
            self._commands.put(trainer_protocol.decode_message(line))
        os._exit(failures.ORPHANED_EXIT_CODE)


class RankChannel:
    """The channel of one of several ranks."""

    def __init__(self, rank: int, size: int) -> None:
        """Connect to the other ranks and, as rank 0, to the parent."""
        self._rank, self._size, self._ranks = rank, size, parallel.SINGLE_RANK
        self._parent = ParentChannel() if rank == 0 else None
        if self._parent is None:
            os.dup2(2, 1)  # stdout belongs to rank 0's events
        self._rendezvous = Rendezvous(rank)

    def read_spec(self) -> trainer_protocol.TrainerSpec:
        """Wait for the spec, which rank 0 passes on; from then on each rank has its own stderr file."""
        if self._parent is None:
            if not (document := self._rendezvous.get(_SPEC, timeout_seconds=ORDER_SECONDS)):
                os._exit(failures.ORPHANED_EXIT_CODE)
            spec = trainer_protocol.TrainerSpec.model_validate_json(document)
        else:
            spec = self._parent.read_spec()
            self._rendezvous.put(_SPEC, spec.model_dump_json().encode())
            threading.Thread(target=self._forward_exception, name="exception", daemon=True).start()
        if folder := os.environ.get("CAIRN_NODE_FOLDER"):  # a machine other than the parent's has its own folder
            work_dir = Path(folder) / "work" / spec.work_dir.name
            spec = spec.model_copy(update={"cache_dir": Path(folder) / "snapshots", "work_dir": work_dir})
        spec.work_dir.mkdir(parents=True, exist_ok=True)
        with trainer_group.rank_stderr(spec.work_dir, spec.attempt, self._rank).open("ab") as stderr:
            os.dup2(stderr.fileno(), 2)
        return spec

    def join(self, spec: trainer_protocol.TrainerSpec) -> Place:
        """Join the other ranks, which all have the spec by then; each rank of a machine gets its own GPU.

        A rank with a number that is not one of the first ones joins later, when it has all but the state.
        """
        device = determinism.resolve_device(spec.training.device)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        mode, store, place = spec.training.parallel, self._rendezvous.store, self._rendezvous.meetings
        if self._rank >= self._size:
            self._ranks = parallel.Ranks(place=place, members=(self._rank,), position=NOWHERE)
        else:
            self._ranks = parallel.join_ranks(
                self._rank, self._size, mode=mode, device=device, store=store, place=place
            )
        return Place(device=device, ranks=self._ranks, rendezvous=self._rendezvous)

    def next_command(self) -> trainer_protocol.Command | trainer_protocol.Event:
        """Wait for the parent's next command; every rank must call it and gets the same command."""
        self._rendezvous.commands += 1
        name = f"command/{self._rendezvous.commands}"
        if self._parent is not None:
            command = self._parent.next_command(meanwhile=self._ranks.attend)
            self._rendezvous.put(name, trainer_protocol.encode_message(command))
            return command
        while not (message := self._rendezvous.get(name, timeout_seconds=_IDLE_SECONDS)):
            self._ranks.attend()
        return trainer_protocol.decode_message(message)

    def send(self, event: trainer_protocol.Event) -> None:
        """Send an event; of a rank other than 0 only an exception is sent, and waited for until rank 0 forwarded it.

        That of a rank that has joined nobody ends nobody else.
        """
        if self._parent is not None:
            self._parent.send(event)
        elif isinstance(event, failures.ExceptionReport) and self._ranks.has_state:
            self._rendezvous.put(_EXCEPTION, trainer_protocol.encode_message(event))
            self._rendezvous.get(_EXCEPTION_SENT, timeout_seconds=_EXCEPTION_SECONDS)

    def _forward_exception(self) -> None:
        event = trainer_protocol.decode_message(self._rendezvous.get(_EXCEPTION))
        if self._parent is not None and isinstance(event, failures.ExceptionReport):
            self._parent.send(event)
        self._rendezvous.put(_EXCEPTION_SENT, b"")


Channel = ParentChannel | RankChannel


def open_channel() -> Channel:
    """Return this process's channel, which the launcher's environment decides if it is one of several ranks."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return ParentChannel() if size == 1 else RankChannel(rank, size)


def exit_on_error(channel: Channel, error: BaseException) -> NoReturn:
    """Send the exception to the parent and exit with 1 at once; a rank that only lost a peer exits 77 in silence."""
    traceback.print_exception(error)
    sys.stderr.flush()
    if isinstance(channel, RankChannel) and parallel.is_peer_loss(error):
        os._exit(failures.PEER_LOST_EXIT_CODE)
    kind = failures.ErrorKind.DEVICE_LOST if parallel.is_peer_loss(error) else None
    channel.send(failures.describe_exception(error, kind))
    os._exit(1)
