"""How many processes on how many machines train one model, and the command that starts this machine's part."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cairn.model.configuration.training import TrainingConfig
from cairn.storage.stores.child_process import child_command
from cairn.tasks.errors import TaskError

TRAINER_COMMAND = child_command("cairn.tasks.trainer.trainer")
STACKS_SIGNAL = signal.SIGQUIT
"""Has every process of a trainer write where its threads are to its stderr."""
RANK_STORE, RENDEZVOUS, RENDEZVOUS_SECRET = "CAIRN_RANK_STORE", "CAIRN_RENDEZVOUS", "CAIRN_RENDEZVOUS_SECRET"
"""Variables: the file where the ranks of one machine meet; where those of several do, and what shows that they may."""
_DEVICES = Path("/dev")
_SECRET_CHARACTERS = 16


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
        rendezvous = self.rendezvous if self.node_rank else f"{self.host}:0"
        several = ("--nodes", self.nodes, "--node-rank", self.node_rank, "--rendezvous", rendezvous)
        options = ("--processes", self.processes, *(several if self.nodes > 1 else ()))
        return child_command("cairn.tasks.trainer.rank_launcher", *options)


def trainer_group(
    training: TrainingConfig, environment: Mapping[str, str], *, devices: Path = _DEVICES
) -> TrainerGroup:
    """Return the group by configuration and scheduler; `auto` is a process a GPU, or one. Raises `TaskError`."""
    processes = training.processes
    group = TrainerGroup(
        processes=_usable_gpus(training.device, environment, devices) if processes == "auto" else processes,
        nodes=_number(environment, "CAIRN_NODES", "1"),
        node_rank=_number(environment, "CAIRN_NODE_RANK", "0"),
        rendezvous=environment.get(RENDEZVOUS, ""),
    )
    if group.nodes > 1:
        rendezvous_secret(environment)
    if group.size > 1 and training.device == "mps":
        raise TaskError(f"training.processes: {group.size} in all; rule: one with training.device = 'mps'")
    if group.size > training.global_batch:
        raise TaskError(
            f"training.processes: {group.size} in all, but training.global_batch = {training.global_batch}; "
            "rule: every process has a row of the batch. Ask for fewer processes"
        )
    return group


def rendezvous_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret that several machines share; raises `TaskError`, which does not repeat it."""
    secret = environment.get(RENDEZVOUS_SECRET, "")
    if len(secret) < _SECRET_CHARACTERS:
        raise TaskError(
            f"{RENDEZVOUS_SECRET}: {len(secret)} characters; rule: at least {_SECRET_CHARACTERS}, the same on every "
            "machine. Make one with: openssl rand -hex 32"
        )
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
