"""The processes of one run, found by a variable in their environment, and signals to them."""

import math
import os
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.crash.victims import send

TAG = "CAIRN_CHAOS_RUN"
_ENGINES = ("prefect.engine", "prefect.flow_engine", "prefect.runner._workspace")


class Role(StrEnum):
    """What a process is for."""

    FLOW = "flow"
    LAUNCHER = "launcher"
    TRAINER = "trainer"
    EVALUATOR = "evaluator"
    WATCHER = "watcher"
    WORKER = "worker"
    SWEEPER = "sweeper"
    SERVER = "server"
    OTHER = "other"


WORKERS = (Role.FLOW, Role.LAUNCHER, Role.TRAINER, Role.EVALUATOR)


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """One living process of the run."""

    pid: int
    role: Role
    words: str = ""
    age_seconds: float = 0.0

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; one that is gone already is no error."""
        send(self.pid, number)


class Processes:
    """The processes that carry one run's tag."""

    def __init__(self, tag: str) -> None:
        self._mark = f"{TAG}={tag}".encode()

    def all(self) -> list[Actor]:
        """Return every living process of the run; one that has ended and is not buried yet has no environment."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and (words := self._words(folder)) is not None:
                said, age = " ".join(words)[:200], _age_seconds(folder)
                found.append(Actor(pid=int(folder.name), role=role_of(words), words=said, age_seconds=age))
        return found

    def of(self, *roles: Role) -> list[Actor]:
        """Return the living ones with these roles."""
        return [actor for actor in self.all() if actor.role in roles]

    def send_signal(self, number: signal.Signals, *roles: Role) -> list[int]:
        """Send all of these roles a signal, parents first; returns whom."""
        struck = sorted(self.of(*roles), key=lambda actor: list(Role).index(actor.role))
        for actor in struck:
            actor.signal(number)
        return [actor.pid for actor in struck]

    def wait_gone(self, pids: list[int] | None = None, *, seconds: float) -> list[Actor]:
        """Wait until these, or all, are gone; returns those that are not."""
        deadline = time.monotonic() + seconds
        while True:
            left = [actor for actor in self.all() if pids is None or actor.pid in pids]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.02)

    def _words(self, folder: Path) -> list[str] | None:
        try:
            if self._mark not in (folder / "environ").read_bytes().split(b"\0"):
                return None
            return (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return None


def _age_seconds(process: Path) -> float:
    """Return for how long a process of /proc has been there; for ever if it is gone."""
    try:
        ticks = int((process / "stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return math.inf
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def role_of(words: list[str]) -> Role:
    """Return what a process with this command line is for."""
    if "cairn.tasks.trainer.trainer" in words:
        return Role.TRAINER
    if "cairn.tasks.trainer.trainer_group" in words:
        return Role.LAUNCHER
    if "cairn.tasks.evaluator.evaluator" in words:
        return Role.EVALUATOR
    if any(word.startswith(_ENGINES) for word in words):  # the flow run of a worker
        return Role.FLOW
    if "cairn.flows.orchestrator.prefect_server" in words:
        return Role.SERVER
    if "tests.programs.chaos.waiting_sweep" in words:
        return Role.SWEEPER
    if "prefect" in words and "worker" in words:
        return Role.WORKER
    if "cairn.cli.command" in words:
        verb = words[words.index("cairn.cli.command") + 1]
        return {"train": Role.FLOW, "watch": Role.WATCHER, "sweep": Role.SWEEPER}.get(verb, Role.OTHER)
    return Role.OTHER
