"""The processes that train one model: how many on how many machines, and the launcher of this machine's ranks.

The launcher (`python -m cairn.tasks.trainer.trainer_group`) starts and watches the ranks. If one exits badly, all are
ended within seconds and the parent learns which one; but one that is killed, and is not rank 0, leaves the others to go
on without it where they have said that they can. Rank 0 inherits stdin and stdout. The ranks of one machine meet in a
folder that only this user can reach, those of several in a small key-value store in the first machine's launcher.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Literal

import msgspec
import psutil

from cairn.model.configuration.training import TrainingConfig
from cairn.storage.stores import child_process
from cairn.tasks.errors import TaskError
from cairn.tasks.policy.failures import PEER_LOST_EXIT_CODE
from cairn.tasks.trainer import rank_values, trainer_protocol

TRAINER_COMMAND = child_process.child_command("cairn.tasks.trainer.trainer")
STACKS_SIGNAL = signal.SIGQUIT
"""Has every process of a trainer write where its threads are to its stderr."""
HUNG_SIGNAL = signal.SIGWINCH
"""Has the launcher kill the ranks that hang, if the others can go on; ignored by a trainer without one."""
RANK_STORE, RENDEZVOUS, RENDEZVOUS_SECRET = "CAIRN_RANK_STORE", "CAIRN_RENDEZVOUS", "CAIRN_RENDEZVOUS_SECRET"
"""Variables: the folder where the ranks of one machine meet; where those of several do, and their secret."""
GO_ON = "cairn/go-on"
"""The value by which the ranks say that they go on without one that is killed."""
_DEVICES = Path("/dev")
_SECRET_CHARACTERS = 16
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 2.0
"""After one rank has failed, the time in which the others may exit by themselves."""
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerGroup:
    """`processes` on each of `nodes` machines; several machines meet at `rendezvous`, HOST:PORT of the first.

    On the first machine this is where commands meet (`machines`); its ranks listen at a free port of the same host.
    """

    processes: int = 1
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""

    def __post_init__(self) -> None:
        if self.processes < 1 or self.nodes < 1:
            raise TaskError(f"processes={self.processes}, nodes={self.nodes}: each must be at least 1")
        if not 0 <= self.node_rank < self.nodes:
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
    training: TrainingConfig, environment: Mapping[str, str], *, devices: Path = _DEVICES
) -> TrainerGroup:
    """Return the group by configuration and scheduler; `auto` is a process a GPU, or one. Raises `TaskError`."""
    processes = training.processes
    processes = _usable_gpus(training.device, environment, devices) if processes == "auto" else processes
    nodes, rank = _number(environment, "CAIRN_NODES", "1"), _number(environment, "CAIRN_NODE_RANK", "0")
    rendezvous = environment.get(RENDEZVOUS, "")
    group = TrainerGroup(processes=processes, nodes=nodes, node_rank=rank, rendezvous=rendezvous)
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
    group, ranks = msgspec.json.decode(sys.argv[1], type=TrainerGroup), dict[int, "Popen[bytes]"]()
    with meeting_place(group) as variables:
        for local in range(group.processes):
            rank = group.node_rank * group.processes + local
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(group.size)}
            environment = {**os.environ, **variables, **own}
            stdin, stdout = (child_process.DEVNULL, sys.stderr.fileno()) if rank else (None, None)
            ranks[rank] = child_process.start_child(
                TRAINER_COMMAND,
                stdin=stdin,
                stdout=stdout,
                stderr=None,
                environment=environment,
                own_group=False,
                with_thread=True,
            )
        folder = variables.get(RANK_STORE)
        survival = Survival(rank_values.FolderValues(Path(folder)), sorted(ranks)) if folder else None
        if survival is not None:
            signal.signal(HUNG_SIGNAL, lambda *_: survival.is_hung.set())
        ended = watch(ranks, survival)
    if ended is None:
        os._exit(0)
    with contextlib.suppress(OSError):
        os.write(1, trainer_protocol.encode_message(ended))
    os._exit(1)


class Survival:
    """Which ranks go on when one is killed: those of one machine that have said `GO_ON`, and always with rank 0."""

    def __init__(self, values: rank_values.FolderValues, ranks: Sequence[int]) -> None:
        """Publish all ranks as the members."""
        self._values, self._members = values, rank_values.Members(ranks=tuple(ranks))
        self._is_over, self.is_hung = False, threading.Event()
        rank_values.write_members(values, self._members)

    def outlives(self, end: trainer_protocol.RankEnded) -> bool:
        """Whether the others go on after this end; publish the members that do, none if they do not."""
        if end.exit_code == 0 or self._is_over:
            if end.rank == 0 and end.exit_code == 0:  # nothing is left to do: one that waits for the others may go
                self._is_over = True
                self._publish(())
            return True
        can_go_on = end.rank and end.exit_code == -signal.SIGKILL and self._values.get(GO_ON) is not None
        left = tuple(rank for rank in self._members.ranks if rank != end.rank) if can_go_on else ()
        self._publish(left)
        return bool(left)

    def find_hung(self, ranks: Mapping[int, "Popen[bytes]"]) -> list[int]:
        """Return the ranks for which the others wait, none of them the first: they are in no exchange, or stopped."""
        if self._values.get(GO_ON) is None:
            return []
        marks = self._values.waiting_path.read_bytes()
        waiting = {rank for rank in self._members.ranks if marks[rank]}
        stopped = {rank for rank in waiting if psutil.Process(ranks[rank].pid).status() == psutil.STATUS_STOPPED}
        hung = sorted(set(self._members.ranks) - waiting | stopped)
        return [] if 0 in hung else hung

    def _publish(self, ranks: Sequence[int]) -> None:
        self._members = rank_values.Members(changes=self._members.changes + 1, ranks=tuple(ranks))
        rank_values.write_members(self._values, self._members)


def watch(
    ranks: Mapping[int, "Popen[bytes]"],
    survival: Survival | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> trainer_protocol.RankEnded | None:
    """Wait until all ranks have ended; two seconds after the first that failed the rest are killed.

    An end that the others outlive is no failure, and the cause of one only where no other is known.
    """
    ends, outlived, grace = list[trainer_protocol.RankEnded](), list[trainer_protocol.RankEnded](), _GRACE_SECONDS
    while len(ends) + len(outlived) < len(ranks):
        known = {end.rank for end in (*ends, *outlived)}
        codes = [(rank, process.poll()) for rank, process in ranks.items() if rank not in known]
        for rank, code in codes:
            if code is not None:
                end = trainer_protocol.RankEnded(rank=rank, exit_code=code)
                (outlived if survival and survival.outlives(end) else ends).append(end)
        if survival is not None and survival.is_hung.is_set():
            survival.is_hung.clear()
            for rank in survival.find_hung(ranks):
                ranks[rank].kill()
        if grace <= 0:
            for process in ranks.values():
                process.kill()
                process.wait()
            break
        grace -= _POLL_SECONDS if any(end.exit_code for end in ends) else 0
        sleep(_POLL_SECONDS)
    return find_failed_rank([*ends, *outlived]) if any(end.exit_code for end in ends) else None


@contextlib.contextmanager
def meeting_place(group: TrainerGroup) -> Iterator[dict[str, str]]:
    """Yield the environment variables that name where the ranks meet."""
    if group.nodes == 1:
        with child_process.temporary_folder("cairn-ranks-") as folder:
            loopback = _LOOPBACK.get(sys.platform, "")
            kept = {name: os.environ.get(name, loopback) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
            yield {RANK_STORE: str(folder / "store"), **{name: value for name, value in kept.items() if value}}
    elif group.node_rank == 0:
        with rank_values.serving_rendezvous(group.rendezvous, rendezvous_secret(os.environ)) as port:
            os.write(1, trainer_protocol.encode_message(trainer_protocol.Listening(port=port)))
            yield {RENDEZVOUS: f"{group.host}:{port}"}
    else:
        yield {RENDEZVOUS: group.rendezvous}


def find_failed_rank(ends: Sequence[trainer_protocol.RankEnded]) -> trainer_protocol.RankEnded | None:
    """Return the end that is the cause, of those that no one here brought about: not one that only lost a peer."""
    failed = [end for end in ends if end.exit_code]
    own = [end for end in failed if end.exit_code != PEER_LOST_EXIT_CODE]
    return next(iter(own or failed), None)


def _forward_signal(number: int, frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.send_signal(number)


if __name__ == "__main__":
    main()
