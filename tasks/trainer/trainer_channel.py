"""The trainer's channel to its parent: commands on stdin, events on stdout; and where several ranks find each other.

Where several ranks train one model, rank 0 talks to the parent and the others to rank 0. Spec and commands reach every
rank; of the events, only an `ExceptionReport` comes from any rank. The ranks of one machine meet in a file, those of
several in a signed connection to the first machine's launcher: nothing else listens, and nothing reads pickles.
"""

import os
import queue
import select
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch.distributed import DistNetworkError, FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from cairn.model.estimates.utilization import measure_machine
from cairn.model.training import determinism, parallel
from cairn.storage.stores.child_process import ORDER_SECONDS
from cairn.tasks.errors import TaskError
from cairn.tasks.policy import failures
from cairn.tasks.trainer import signed_connection, trainer_group, trainer_protocol

_SPEC, _EXCEPTION, _EXCEPTION_SENT = "spec", "exception", "exception-sent"
_EXCEPTION_SECONDS = 5.0
_CONNECT_SECONDS = 30.0
_TIMEOUT = timedelta(minutes=5)
_POLL_SECONDS = 0.02


class RemoteRankStore(Store):
    """The store in another process, for several threads; `DistNetworkError` once its connection is lost, as torch."""

    def __init__(self, address: str, secret: bytes, rank: int) -> None:
        """Join as `rank`; raises `TaskError` if that is taken."""
        super().__init__()
        self._lock = threading.Lock()
        try:  # the first machine's launcher listens before any rank starts
            self._peer = signed_connection.connect(address, secret, timeout_seconds=_CONNECT_SECONDS)
        except (OSError, signed_connection.ConnectionEnded) as error:
            raise DistNetworkError(f"{address}: the first machine's launcher does not answer: {error}") from error
        if self.add(f"joined/{rank}", 1) > 1:
            self.close()
            raise TaskError(f"rank {rank} has joined this attempt already; the next attempt has a place for it")

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        self._ask("set", key, value=_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        self.wait([key])
        return self._ask("get", key).value or b""

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""
        return self._ask("add", key, number=amount).number

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Store a value where another is expected and is there; returns what is there then."""
        return self._ask("compare_set", key, value=_bytes(desired), expected=_bytes(expected)).value or b""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these keys have a value."""
        return all(self._ask("get", key).value is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        """Wait until all these keys have a value; raises `TimeoutError` after the timeout."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no value for {', '.join(keys)} within {timeout}")
            time.sleep(_POLL_SECONDS)

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether it was there."""
        return bool(self._ask("delete", key).number)

    def clone(self) -> "RemoteRankStore":
        """Return the same store: its connection may be shared."""
        return self

    def close(self) -> None:
        """Hang up."""
        self._peer.close()

    def _ask(self, operation: trainer_group.Operation, key: str, **values: Any) -> trainer_group.Answer:
        request = trainer_group.Request(operation=operation, key=key, **values)
        try:
            with self._lock:
                self._peer.send(msgspec.msgpack.encode(request))
                return msgspec.msgpack.decode(self._peer.receive(), type=trainer_group.Answer)
        except (OSError, signed_connection.ConnectionEnded) as error:
            raise DistNetworkError(f"the first machine's launcher is gone: {error}") from error


def open_rank_store(environment: Mapping[str, str], *, rank: int, size: int) -> Store:
    """Return the store that the launcher named in the environment."""
    if path := environment.get(trainer_group.RANK_STORE):
        return FileStore(path, size)
    return RemoteRankStore(environment[trainer_group.RENDEZVOUS], trainer_group.rendezvous_secret(environment), rank)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class Rendezvous:
    """A key-value store that every rank reaches and that outlives any; `store` is torch's, for the process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.store = open_rank_store(os.environ, rank=rank, size=size)
        self._values = PrefixStore("cairn", self.store)

    def put(self, name: str, data: bytes) -> None:
        """Store bytes under a name, over earlier ones."""
        self._values.set(name, data)  # type: ignore[arg-type] # the stub has text only

    def get(self, name: str, *, timeout_seconds: float = float("inf")) -> bytes:
        """Wait for the bytes under a name and return them; none after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not self._values.check([name]):  # polls, because several threads share the connection
            if time.monotonic() > deadline:
                return b""
            time.sleep(_POLL_SECONDS)
        return bytes(self._values.get(name))


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

    def next_command(self) -> trainer_protocol.Command | trainer_protocol.Event:
        """Wait for the parent's next command."""
        return self._commands.get()

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
        self._rank, self._size, self._ranks, self._commands = rank, size, parallel.SINGLE_RANK, 0
        self._parent = ParentChannel() if rank == 0 else None
        if self._parent is None:
            os.dup2(2, 1)  # stdout belongs to rank 0's events
        self._rendezvous = Rendezvous(rank, size)

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
        """Join the other ranks, which all have the spec by then; each rank of a machine gets its own GPU."""
        device = determinism.resolve_device(spec.training.device)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        mode, store = spec.training.parallel, self._rendezvous.store
        self._ranks = parallel.join_ranks(self._rank, self._size, mode=mode, device=device, store=store)
        return Place(device=device, ranks=self._ranks, rendezvous=self._rendezvous)

    def next_command(self) -> trainer_protocol.Command | trainer_protocol.Event:
        """Wait for the parent's next command; every rank must call it and gets the same command."""
        self._commands += 1
        name = f"command/{self._commands}"
        if self._parent is not None:
            command = self._parent.next_command()
            self._rendezvous.put(name, trainer_protocol.encode_message(command))
            return command
        return trainer_protocol.decode_message(self._rendezvous.get(name))

    def send(self, event: trainer_protocol.Event) -> None:
        """Send an event; of a rank other than 0 only an exception is sent, and waited for until rank 0 forwarded it."""
        if self._parent is not None:
            self._parent.send(event)
        elif isinstance(event, failures.ExceptionReport):
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
