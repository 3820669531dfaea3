"""The processes that train one model: how many on how many machines, and the launcher of this machine's ranks.

The launcher (`python -m cairn.tasks.trainer.trainer_group`) starts and watches the ranks. If one exits badly, all are
ended within seconds and the parent learns which one; but one that is killed, and is not rank 0, leaves the others to go
on where they have said that they can, and another one is started to join them. Rank 0 inherits stdin and stdout. The
ranks of one machine meet in a folder that only this user can reach, those of several in the first machine's launcher.
"""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from subprocess import Popen
from types import FrameType
from typing import Literal

import msgspec
import psutil

from cairn.model.configuration.training import TrainingConfig
from cairn.storage.stores import child_process
from cairn.tasks.errors import TaskError
from cairn.tasks.policy.failures import OUTLIVED_EXIT_CODE
from cairn.tasks.trainer import rank_values, trainer_protocol
from cairn.tasks.trainer.launched_ranks import LAUNCHER, LaunchedRanks

TRAINER_COMMAND = child_process.child_command("cairn.tasks.trainer.trainer")
STACKS_SIGNAL = signal.SIGQUIT
"""Has every process of a trainer write where its threads are to its stderr."""
HUNG_SIGNAL = signal.SIGWINCH
"""Has the launcher kill the ranks that hang, if the others can go on; ignored by a trainer without one."""
RANK_STORE, RENDEZVOUS, RENDEZVOUS_SECRET = "CAIRN_RANK_STORE", "CAIRN_RENDEZVOUS", "CAIRN_RENDEZVOUS_SECRET"
"""Variables: the folder where the ranks of one machine meet; where those of several do, and their secret."""
RANK_MARKS = "CAIRN_RANK_MARKS"
"""Variable: the file in which the ranks of this machine mark that they wait for others."""
_DEVICES = Path("/dev")
_SECRET_CHARACTERS = 16
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerGroup:
    """`processes` on each of `nodes` machines; several machines meet at `rendezvous`, HOST:PORT of the first.

    On the first machine this is where commands meet (`machines`); its ranks listen at a free port of the same host.
    The ranks of a machine that `joins` are let in by those that train; its number is one that no other had.
    """

    processes: int = 1
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    joins: bool = False

    def __post_init__(self) -> None:
        if self.processes < 1 or self.nodes < 1:
            raise TaskError(f"processes={self.processes}, nodes={self.nodes}: each must be at least 1")
        if not 0 <= self.node_rank < self.nodes and not self.joins:
            raise TaskError(f"node_rank={self.node_rank}: must be from 0 to nodes - 1 = {self.nodes - 1}")
        if self.nodes > 1 and not re.fullmatch(r"[^\s:]+:\d+", self.rendezvous):
            raise TaskError(f"rendezvous={self.rendezvous!r}: several nodes need HOST:PORT of the first one")

    @property
    def size(self) -> int:
        """The number of processes in all."""
        return self.processes * self.nodes

    @property
    def host(self) -> str:
        """The first machine's host."""
        return self.rendezvous.rpartition(":")[0]

    def command(self) -> tuple[str, ...]:
        """Return the command that starts this machine's part: the trainer itself, or a launcher of several."""
        if self.size == 1:
            return TRAINER_COMMAND
        is_first_of_several = self.nodes > 1 and not self.node_rank
        group = replace(self, rendezvous=f"{self.host}:0") if is_first_of_several else self
        return child_process.child_command("cairn.tasks.trainer.trainer_group", msgspec.json.encode(group).decode())


def trainer_group(
    training: TrainingConfig, environment: Mapping[str, str], *, spares: int = 0, devices: Path = _DEVICES
) -> TrainerGroup:
    """Return the group by configuration and scheduler, without the machines that are `spares`; raises `TaskError`.

    `auto` is a process a GPU, or one.
    """
    processes = training.processes
    processes = _usable_gpus(training.device, environment, devices) if processes == "auto" else processes
    nodes, rank = _number(environment, "CAIRN_NODES", "1"), _number(environment, "CAIRN_NODE_RANK", "0")
    rendezvous = environment.get(RENDEZVOUS, "")
    if spares and nodes - spares < 2:
        rule = "at least two machines train, because the first one's end is the attempt's"
        raise TaskError(f"machines.spares={spares} of CAIRN_NODES={nodes}; rule: {rule}")
    group = TrainerGroup(processes=processes, nodes=nodes, node_rank=rank, rendezvous=rendezvous)
    group = replace(group, nodes=nodes - spares, joins=rank >= nodes - spares)
    if group.nodes > 1:
        rendezvous_secret(environment)
    if group.size > 1 and training.device == "mps":
        raise TaskError(f"training.processes: {group.size} in all; rule: one with training.device = 'mps'")
    if group.size > training.global_batch:
        problem = f"{group.size} in all, but training.global_batch = {training.global_batch}"
        rule = "every process has a row of the batch. Ask for fewer processes"
        raise TaskError(f"training.processes: {problem}; rule: {rule}")
    return group


def planned_variables(environment: Mapping[str, str], machines: int) -> Mapping[str, str]:
    """Return variables for the plan of a run on so many machines, which need not be there."""
    place = {"CAIRN_NODES": str(machines), "CAIRN_NODE_RANK": "0", RENDEZVOUS: "planned:0"}
    return {**environment, **place, RENDEZVOUS_SECRET: "-" * _SECRET_CHARACTERS}


def rendezvous_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret that several machines share; raises `TaskError`, which does not repeat it."""
    secret = environment.get(RENDEZVOUS_SECRET, "")
    if len(secret) < _SECRET_CHARACTERS:
        rule = f"at least {_SECRET_CHARACTERS}, the same on every machine. Make one with: openssl rand -hex 32"
        raise TaskError(f"{RENDEZVOUS_SECRET}: {len(secret)} characters; rule: {rule}")
    return secret.encode()


def rank_stderr(work_dir: Path, attempt: int, rank: int | Literal["*"]) -> Path:
    """Return the file that one of several ranks writes its stderr to."""
    return work_dir / f"attempt-{attempt:04d}.rank-{rank}.stderr"


def _number(environment: Mapping[str, str], name: str, default: str) -> int:
    text = environment.get(name) or default
    if not (text.isascii() and text.isdigit()):
        raise TaskError(f"{name}={text!r}: must be a number")
    return int(text)


def _usable_gpus(device: str, environment: Mapping[str, str], devices: Path) -> int:
    if device == "cpu" or ":" in device:
        return 1
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in visible.split(",")]
        return max(1, len(names[: names.index("-1")] if "-1" in names else [name for name in names if name]))
    return max(1, sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*")))


def main() -> None:
    """Run the ranks of the group in the argument to their end; if one failed, send which to the parent and exit 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, STACKS_SIGNAL):
        signal.signal(number, _forward_signal)
    group = msgspec.json.decode(sys.argv[1], type=TrainerGroup)
    with meeting_place(group) as place:
        first = group.node_rank * group.processes
        ranks = LaunchedRanks(
            place.values,
            rank_values.WaitingMarks(Path(place.variables[RANK_MARKS])),
            partial(_start_rank, group, place.variables),
            size=group.size,
            launcher=group.node_rank,
            gone=place.gone,
            report=_report,
        )
        signal.signal(HUNG_SIGNAL, lambda *_: ranks.is_hung.set())
        ranks.start([ranks.next_rank() if group.joins else first + local for local in range(group.processes)])
        ended = ranks.wait()
        has_finished = ranks.has_finished()
    if ended is None:
        os._exit(0 if has_finished else OUTLIVED_EXIT_CODE)
    _report(ended)
    os._exit(1)


def _start_rank(group: TrainerGroup, variables: Mapping[str, str], rank: int, local: int) -> "Popen[bytes]":
    own = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(group.size)}
    stdin, stdout = (child_process.DEVNULL, sys.stderr.fileno()) if rank else (None, None)
    return child_process.start_child(
        TRAINER_COMMAND,
        stdin=stdin,
        stdout=stdout,
        stderr=None,
        environment={**os.environ, **variables, **own},
        own_group=False,
        with_thread=True,
    )


def _report(event: trainer_protocol.Event) -> None:
    """Send an event to the parent; another machine's launcher has none that listens."""
    with contextlib.suppress(OSError):
        os.write(1, trainer_protocol.encode_message(event))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingPlace:
    """Where ranks meet: the variables that name it, its values, and the names of those who have hung up on it."""

    variables: dict[str, str]
    values: rank_values.SharedValues
    gone: "SimpleQueue[str]" = field(default_factory=SimpleQueue)


@contextlib.contextmanager
def meeting_place(group: TrainerGroup) -> Iterator[MeetingPlace]:
    """Open the place where the ranks of the group meet while the block runs."""
    with child_process.temporary_folder("cairn-ranks-") as folder:
        marks = {RANK_MARKS: str(folder / "marks")}
        if group.nodes == 1:
            loopback = _LOOPBACK.get(sys.platform, "")
            kept = {name: os.environ.get(name, loopback) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
            named = {RANK_STORE: str(folder / "store"), **{name: value for name, value in kept.items() if value}}
            yield MeetingPlace(variables=marks | named, values=rank_values.FolderValues(folder / "store"))
        elif group.node_rank == 0:
            values, gone = rank_values.MemoryValues(), SimpleQueue[str]()
            serving = rank_values.serving_rendezvous(
                group.rendezvous, rendezvous_secret(os.environ), values, on_gone=gone.put
            )
            with serving as port:
                _report(trainer_protocol.Listening(port=port))
                named = {RENDEZVOUS: f"{group.host}:{port}"}
                yield MeetingPlace(variables=marks | named, values=values, gone=gone)
        else:
            secret, name = rendezvous_secret(os.environ), f"{LAUNCHER}{group.node_rank}"
            remote = rank_values.RemoteValues(group.rendezvous, secret, name)
            yield MeetingPlace(variables=marks | {RENDEZVOUS: group.rendezvous}, values=remote)


def _forward_signal(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.send_signal(number)


if __name__ == "__main__":
    main()
