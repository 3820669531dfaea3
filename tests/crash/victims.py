"""Who dies: finding trainers, and killing for real."""

import os
import signal
import subprocess
from collections.abc import Sequence

import psutil

from tests.processes.waiting import patience_seconds


def descendants_with(process: "subprocess.Popen[bytes]", word: str) -> list[psutil.Process]:
    """Return the processes below this one whose command line has `word`."""
    found = []
    try:
        for child in psutil.Process(process.pid).children(recursive=True):
            with_words: Sequence[str] = child.cmdline() if child.is_running() else ()
            if word in with_words:
                found.append(child)
    except psutil.NoSuchProcess:
        return []
    return found


def trainers_of(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """Return the trainer processes below the command."""
    return descendants_with(process, "cairn.tasks.trainer.trainer")


def servers_of(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """Return the command's temporary Prefect servers."""
    return descendants_with(process, "cairn.flows.orchestrator.prefect_server")


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until these, of which there must be some, have ended."""
    _, alive = psutil.wait_procs(processes, timeout=patience_seconds())
    assert processes and not alive


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal to a process that may be gone already; returns whether it was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill(pid: int) -> None:
    """SIGKILL a process that may be gone already."""
    send(pid, signal.SIGKILL)


def kill_trainer(process: "subprocess.Popen[bytes]") -> None:
    """Kill the child alone."""
    for trainer in trainers_of(process):
        kill(trainer.pid)


def kill_flow(process: "subprocess.Popen[bytes]") -> None:
    """Kill the parent alone, and wait for its end."""
    kill(process.pid)
    process.wait()


def kill_both(process: "subprocess.Popen[bytes]") -> None:
    """Kill parent and child, and wait for the parent's end."""
    trainers = trainers_of(process)
    kill(process.pid)
    for trainer in trainers:
        kill(trainer.pid)
    process.wait()
