"""Two machines, which are two commands of one run here."""

import socket
import subprocess

from tests.crash.training_command import Command
from tests.processes.waiting import wait_for
from tests.programs.benchmarks.own_process import set_options

STEPS = 24
SETTINGS = (
    f"training.steps={STEPS}",
    "evaluation.every_commits=100",
    "checkpoint.every_steps=4",
    "training.processes=1",
    "training.micro_batch=2",
    "model.dropout=0.0",
    "training.precision=fp32",
    "training.kernels=stock",
)
PAUSE = "pause@9"


class TwoMachines:
    """One run, and the same command for it as either of two machines gives it."""

    def __init__(self, command: Command) -> None:
        self.command = command
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]

    def start(
        self, rank: int, *more: str, faults: str = "", nodes: int = 2, **variables: str
    ) -> "subprocess.Popen[bytes]":
        return self.command.start(
            *set_options((*SETTINGS, *more)),
            CAIRN_FAULTS=faults,
            CAIRN_NODES=str(nodes),
            CAIRN_NODE_RANK=str(rank),
            CAIRN_RENDEZVOUS=f"127.0.0.1:{self._port}",
            CAIRN_RENDEZVOUS_SECRET="0123456789abcdef",
            CAIRN_CACHE=str(self.command.folder / f"cache-{rank}"),
            **variables,
        )

    def both(self, *more: str, faults: str = "") -> "list[subprocess.Popen[bytes]]":
        """Start both; returns the first and the other."""
        return [self.start(rank, *more, faults=faults) for rank in (0, 1)]

    def both_at_pause(self, *more: str) -> "list[subprocess.Popen[bytes]]":
        machines = self.both(*more, faults=PAUSE)
        self.command.wait_for_fault(PAUSE, machines[0])
        return machines

    def ends(self) -> list[tuple[str, int, int]]:
        """Why each attempt ended, and how many machines it had and wanted."""
        attempts = [(record.ended, record.started.placement) for record in self.command.state().attempts]
        return [(ended.reason if ended else "", place.nodes, place.nodes_wanted) for ended, place in attempts]

    def wait_until_says(self, number: int, words: str, process: "subprocess.Popen[bytes]") -> None:
        """Wait until the command that was started as number so and so has printed this."""
        output = self.command.folder / f"command-{number}.txt"
        wait_for(lambda: words in output.read_text(encoding="utf-8", errors="replace"), process, words)
