"""The trainer's channel where several ranks train one model: rank 0 talks to the parent, the others to rank 0.

Spec and commands reach every rank; of the events, only an `ExceptionReport` comes from any rank.
"""

import os
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from model.training.determinism import resolve_device
from model.training.parallel import SINGLE_RANK, Ranks, is_peer_loss, join_ranks
from tasks.policy.failures import PEER_LOST_EXIT_CODE, ExceptionReport
from tasks.trainer.parent_channel import Channel, ParentChannel, report_and_exit
from tasks.trainer.parent_watch import kill_with_parent
from tasks.trainer.rendezvous import Rendezvous
from tasks.trainer.trainer_group import rank_stderr
from tasks.trainer.trainer_protocol import (
    Command,
    Event,
    Finish,
    TrainerSpec,
    TrainUntil,
    decode_message,
    encode_message,
)

_SPEC, _EXCEPTION, _EXCEPTION_SENT = "spec", "exception", "exception-sent"
_EXCEPTION_SECONDS = 5.0
_FINISH, _TRAIN = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process among those that train one model: its device, the ranks and, if several, their rendezvous."""

    device: torch.device
    ranks: Ranks = SINGLE_RANK
    rendezvous: Rendezvous | None = None


class RankChannel:
    """The channel of one of several ranks."""

    def __init__(self, rank: int, size: int) -> None:
        """Connect to the other ranks and, as rank 0, to the parent."""
        kill_with_parent(os.getppid())
        self._rank, self._size, self._ranks = rank, size, SINGLE_RANK
        self._parent = ParentChannel() if rank == 0 else None
        if self._parent is None:
            os.dup2(2, 1)  # stdout belongs to rank 0's events
        self.rendezvous = Rendezvous()

    def read_spec(self) -> TrainerSpec:
        """Wait for the spec, which rank 0 passes on; from then on each rank has its own stderr file."""
        if self._parent is None:
            data = self.rendezvous.get(_SPEC)
            assert data is not None
            spec = TrainerSpec.model_validate_json(data)
        else:
            spec = self._parent.read_spec()
            self.rendezvous.put(_SPEC, spec.model_dump_json().encode())
            threading.Thread(target=self._forward_exception, name="exception", daemon=True).start()
        spec = _on_this_node(spec)
        spec.work_dir.mkdir(parents=True, exist_ok=True)
        with rank_stderr(spec.work_dir, spec.attempt, self._rank).open("ab") as stderr:
            os.dup2(stderr.fileno(), 2)
        return spec

    def join(self, spec: TrainerSpec, device: torch.device) -> Ranks:
        """Join the other ranks; every rank has the spec by then."""
        mode = spec.training.parallel
        self._ranks = join_ranks(self._rank, self._size, mode=mode, device=device, store=self.rendezvous.store)
        return self._ranks

    def next_command(self) -> Command:
        """Wait for the parent's next command; every rank must call it and gets the same command."""
        numbers = (_FINISH, 0)
        if self._parent is not None:
            command = self._parent.next_command()
            numbers = (_TRAIN, command.step) if isinstance(command, TrainUntil) else numbers
        kind, step = self._ranks.broadcast(numbers)
        return TrainUntil(step=step) if kind == _TRAIN else Finish()

    def send(self, event: Event) -> None:
        """Send an event; of a rank other than 0 only an exception is sent, and waited for until rank 0 forwarded it."""
        if self._parent is not None:
            self._parent.send(event)
        elif isinstance(event, ExceptionReport):
            self.rendezvous.put(_EXCEPTION, encode_message(event))
            self.rendezvous.get(_EXCEPTION_SENT, timeout_seconds=_EXCEPTION_SECONDS)

    def _forward_exception(self) -> None:
        assert self._parent is not None
        data = self.rendezvous.get(_EXCEPTION)
        assert data is not None
        event = decode_message(data)
        if isinstance(event, ExceptionReport):
            self._parent.send(event)
        self.rendezvous.put(_EXCEPTION_SENT, b"")


def open_channel() -> ParentChannel | RankChannel:
    """Return this process's channel; torchrun's environment says whether it is one of several ranks."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return ParentChannel() if size == 1 else RankChannel(rank, size)


def join(channel: ParentChannel | RankChannel, spec: TrainerSpec) -> Place:
    """Return this process's place; each of several ranks on a machine gets its own GPU."""
    device = resolve_device(spec.training.device)
    if isinstance(channel, ParentChannel):
        return Place(device=device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return Place(device=device, ranks=channel.join(spec, device), rendezvous=channel.rendezvous)


def exit_on_error(channel: Channel, error: BaseException) -> NoReturn:
    """Report the exception and exit with 1.

    A rank that failed only because a peer died exits 77 silently, so that the peer's error is recorded.
    """
    if isinstance(channel, RankChannel) and is_peer_loss(error):
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(PEER_LOST_EXIT_CODE)
    report_and_exit(channel, error)


def thread_share(threads: int) -> int:
    """Return how many of the machine's `threads` this process may use."""
    return max(1, threads // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _on_this_node(spec: TrainerSpec) -> TrainerSpec:
    """On a machine other than the parent's, caches and work files are in that machine's own folder."""
    folder = os.environ.get("CAIRN_NODE_FOLDER")
    if not folder:
        return spec
    root = Path(folder)
    return spec.model_copy(update={"cache_dir": root / "snapshots", "work_dir": root / "work" / spec.run_id})
