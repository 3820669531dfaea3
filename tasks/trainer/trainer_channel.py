"""The trainer's channel to its parent: commands on stdin, events on stdout.

Where several ranks train one model, rank 0 talks to the parent and the others to rank 0. Spec and commands reach every
rank; of the events, only an `ExceptionReport` comes from any rank.
"""

import os
import queue
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from model.estimates.utilization import measure_machine
from model.training.determinism import resolve_device
from model.training.parallel import SINGLE_RANK, Ranks, is_peer_loss, join_ranks
from model.training.thread_trial import time_steps
from tasks.policy.failures import ORPHANED_EXIT_CODE, PEER_LOST_EXIT_CODE, ErrorKind, ExceptionReport, kind_of
from tasks.trainer.parent_watch import kill_with_parent
from tasks.trainer.rank_store import open_rank_store
from tasks.trainer.trainer_group import rank_stderr
from tasks.trainer.trainer_protocol import (
    FIRST_LINES,
    Command,
    Event,
    Finish,
    SpeedTrial,
    ThreadTrial,
    TrainerSpec,
    TrainUntil,
    TrialDone,
    decode_message,
    encode_message,
)

_SPEC, _EXCEPTION, _EXCEPTION_SENT = "spec", "exception", "exception-sent"
_EXCEPTION_SECONDS = 5.0
_POLL_SECONDS = 0.02


class Rendezvous:
    """A key-value store that every rank reaches and that outlives any; `store` is torch's, for the process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.store = open_rank_store(os.environ, rank=rank, size=size)
        self._values = PrefixStore("cairn", self.store)

    def put(self, name: str, data: bytes) -> None:
        """Store bytes under a name, over earlier ones."""
        self._values.set(name, data)  # type: ignore[arg-type] # the stub knows text only

    def get(self, name: str, *, timeout_seconds: float = float("inf")) -> bytes | None:
        """Wait for the bytes under a name and return them; None after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not self._values.check([name]):  # polls, because several threads share the connection
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return bytes(self._values.get(name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process among those that train one model: its device, the ranks and, if several, their rendezvous."""

    device: torch.device
    ranks: Ranks = SINGLE_RANK
    rendezvous: Rendezvous | None = None


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
        while not isinstance(spec := self._read_first_line(), TrainerSpec):
            if isinstance(spec, ThreadTrial):
                self.send(TrialDone(step_seconds=time_steps(spec.model, spec.training, spec.candidates)))
            else:
                self.send(measure_machine())
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()
        return spec

    def _read_first_line(self) -> SpeedTrial | ThreadTrial | TrainerSpec:
        line = sys.stdin.buffer.readline()
        if not line:
            os._exit(ORPHANED_EXIT_CODE)  # started ahead for a run that did not begin
        return FIRST_LINES.validate_json(line)

    def join(self, spec: TrainerSpec) -> Place:
        """Return the place of the only process."""
        return Place(device=resolve_device(spec.training.device))

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


class RankChannel:
    """The channel of one of several ranks."""

    def __init__(self, rank: int, size: int) -> None:
        """Connect to the other ranks and, as rank 0, to the parent."""
        kill_with_parent(os.getppid())
        self._rank, self._size, self._ranks, self._commands = rank, size, SINGLE_RANK, 0
        self._parent = ParentChannel() if rank == 0 else None
        if self._parent is None:
            os.dup2(2, 1)  # stdout belongs to rank 0's events
        self._rendezvous = Rendezvous(rank, size)

    def read_spec(self) -> TrainerSpec:
        """Wait for the spec, which rank 0 passes on; from then on each rank has its own stderr file."""
        if self._parent is None:
            data = self._rendezvous.get(_SPEC)
            assert data is not None
            spec = TrainerSpec.model_validate_json(data)
        else:
            spec = self._parent.read_spec()
            self._rendezvous.put(_SPEC, spec.model_dump_json().encode())
            threading.Thread(target=self._forward_exception, name="exception", daemon=True).start()
        if folder := os.environ.get("CAIRN_NODE_FOLDER"):  # a machine other than the parent's has its own folder
            work_dir = Path(folder) / "work" / spec.run_id
            spec = spec.model_copy(update={"cache_dir": Path(folder) / "snapshots", "work_dir": work_dir})
        spec.work_dir.mkdir(parents=True, exist_ok=True)
        with rank_stderr(spec.work_dir, spec.attempt, self._rank).open("ab") as stderr:
            os.dup2(stderr.fileno(), 2)
        return spec

    def join(self, spec: TrainerSpec) -> Place:
        """Join the other ranks, which all have the spec by then; each rank of a machine gets its own GPU."""
        device = resolve_device(spec.training.device)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        mode, store = spec.training.parallel, self._rendezvous.store
        self._ranks = join_ranks(self._rank, self._size, mode=mode, device=device, store=store)
        return Place(device=device, ranks=self._ranks, rendezvous=self._rendezvous)

    def next_command(self) -> Command:
        """Wait for the parent's next command; every rank must call it and gets the same command."""
        self._commands += 1
        name = f"command/{self._commands}"
        if self._parent is not None:
            command = self._parent.next_command()
            self._rendezvous.put(name, encode_message(command))
            return command
        data = self._rendezvous.get(name)
        assert data is not None
        message = decode_message(data)
        assert isinstance(message, TrainUntil | Finish)
        return message

    def send(self, event: Event) -> None:
        """Send an event; of a rank other than 0 only an exception is sent, and waited for until rank 0 forwarded it."""
        if self._parent is not None:
            self._parent.send(event)
        elif isinstance(event, ExceptionReport):
            self._rendezvous.put(_EXCEPTION, encode_message(event))
            self._rendezvous.get(_EXCEPTION_SENT, timeout_seconds=_EXCEPTION_SECONDS)

    def _forward_exception(self) -> None:
        assert self._parent is not None
        data = self._rendezvous.get(_EXCEPTION)
        assert data is not None
        event = decode_message(data)
        if isinstance(event, ExceptionReport):
            self._parent.send(event)
        self._rendezvous.put(_EXCEPTION_SENT, b"")


Channel = ParentChannel | RankChannel


def open_channel() -> Channel:
    """Return this process's channel; the launcher's environment says whether it is one of several ranks."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return ParentChannel() if size == 1 else RankChannel(rank, size)


def exit_on_error(channel: Channel, error: BaseException) -> NoReturn:
    """Send the exception to the parent and exit with 1 at once; a rank that only lost a peer exits 77 in silence."""
    trace = traceback.format_exception(error)
    sys.stderr.write("".join(trace))
    sys.stderr.flush()
    if isinstance(channel, RankChannel) and is_peer_loss(error):
        os._exit(PEER_LOST_EXIT_CODE)
    channel.send(
        ExceptionReport(
            kind=ErrorKind.DEVICE_LOST if is_peer_loss(error) else kind_of(error),
            exception=type(error).__name__,
            message=str(error),
            traceback=tuple(trace),
            step=getattr(error, "step", None),
            windows=tuple(getattr(error, "windows", ())),
            spike_step=getattr(error, "spike_step", None),
        )
    )
    os._exit(1)
