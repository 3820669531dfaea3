"""The trainer's line where one model has several processes: rank 0 speaks with the parent, the others through it.

Owns who hears what: order and commands reach every rank, of the events only last words come from any rank. Refuses to
start processes. Alone, the line is the one to the parent as it is.
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
from tasks.trainer.parent_channel import Line, ParentChannel, die
from tasks.trainer.rank_lifetime import end_with
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

_ORDER, _DYING, _HEARD = "order", "dying", "heard"
_LAST_WORDS_SECONDS = 5.0
_FINISH, _TRAIN = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A process among those that train one model: its device, and where they leave each other things if several."""

    device: torch.device
    ranks: Ranks = SINGLE_RANK
    meeting: Rendezvous | None = None


class RankChannel:
    """The line of one of several ranks."""

    def __init__(self, rank: int, size: int) -> None:
        """Take the parent's line if this is rank 0, and reach the others."""
        end_with(os.getppid())
        self._rank, self._size, self._ranks = rank, size, SINGLE_RANK
        self._parent = ParentChannel() if rank == 0 else None
        if self._parent is None:
            os.dup2(2, 1)  # it is not this rank's to speak: what it prints is for its own stderr
        self._meeting = Rendezvous()

    @property
    def meeting(self) -> Rendezvous:
        """Where the ranks leave each other things."""
        return self._meeting

    def order(self) -> TrainerSpec:
        """Wait for the order; rank 0 leaves it for the others. From then on each rank has a stderr of its own."""
        if self._parent is None:
            left = self._meeting.take(_ORDER)
            assert left is not None
            order = TrainerSpec.model_validate_json(left)
        else:
            order = self._parent.order()
            self._meeting.leave(_ORDER, order.model_dump_json().encode())
            threading.Thread(target=self._pass_on_last_words, name="last-words", daemon=True).start()
        order = _on_this_node(order)
        order.work_dir.mkdir(parents=True, exist_ok=True)
        with rank_stderr(order.work_dir, order.attempt, self._rank).open("ab") as own:
            os.dup2(own.fileno(), 2)
        return order

    def join(self, order: TrainerSpec, device: torch.device) -> Ranks:
        """Meet the other ranks, once all of them have the order."""
        mode = order.training.parallel
        self._ranks = join_ranks(self._rank, self._size, mode=mode, device=device, store=self._meeting.store)
        return self._ranks

    def next_command(self) -> Command:
        """Wait for the parent's next command, which every rank is told; all must ask."""
        said = (_FINISH, 0)
        if self._parent is not None:
            command = self._parent.next_command()
            said = (_TRAIN, command.step) if isinstance(command, TrainUntil) else said
        kind, step = self._ranks.broadcast(said)
        return TrainUntil(step=step) if kind == _TRAIN else Finish()

    def send(self, event: Event) -> None:
        """Tell the parent; of another rank than 0 only the last words are passed on, which this waits for."""
        if self._parent is not None:
            self._parent.send(event)
        elif isinstance(event, ExceptionReport):
            self._meeting.leave(_DYING, encode_message(event))
            self._meeting.take(_HEARD, patience_seconds=_LAST_WORDS_SECONDS)

    def _pass_on_last_words(self) -> None:
        assert self._parent is not None
        words = self._meeting.take(_DYING)
        assert words is not None
        event = decode_message(words)
        if isinstance(event, ExceptionReport):
            self._parent.send(event)
        self._meeting.leave(_HEARD, b"")


def open_line() -> ParentChannel | RankChannel:
    """Return this process's line: torchrun's environment says whether it is one of several."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return ParentChannel() if size == 1 else RankChannel(rank, size)


def join(line: ParentChannel | RankChannel, order: TrainerSpec) -> Place:
    """Return this process's place; of several on a machine each has a GPU of its own."""
    device = resolve_device(order.training.device)
    if isinstance(line, ParentChannel):
        return Place(device=device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return Place(device=device, ranks=line.join(order, device), meeting=line.meeting)


def fall(line: Line, error: BaseException) -> NoReturn:
    """End this process with its last words; who only fell because another rank is gone leaves the word to that one."""
    if isinstance(line, RankChannel) and is_peer_loss(error):
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(PEER_LOST_EXIT_CODE)
    die(line, error)


def own_threads(threads: int) -> int:
    """Return how many of the machine's `threads` are this process's."""
    return max(1, threads // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _on_this_node(order: TrainerSpec) -> TrainerSpec:
    """On another machine than the parent's, caches and files of the work lie in that machine's own folder."""
    folder = os.environ.get("CAIRN_NODE_FOLDER")
    if not folder:
        return order
    place = Path(folder)
    return order.model_copy(update={"cache_dir": place / "snapshots", "work_dir": place / "work" / order.run_id})
