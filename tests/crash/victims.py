"""Who dies and when: finding trainers, killing for real, waiting for events of another process."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import psutil

from storage.logs.step_log import read_step_records
from tests.crash.training_command import Command


def trainers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the trainer processes below the command."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
        return [child for child in children if "tasks.trainer.trainer" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []


def kill(pid: int) -> None:
    """SIGKILL a process that may be gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill_trainer(process: subprocess.Popen[bytes]) -> None:
    """Kill the child alone."""
    for trainer in trainers_of(process):
        kill(trainer.pid)


def kill_flow(process: subprocess.Popen[bytes]) -> None:
    """Kill the parent alone."""
    kill(process.pid)


def kill_both(process: subprocess.Popen[bytes]) -> None:
    """Kill parent and child."""
    trainers = trainers_of(process)
    kill(process.pid)
    for trainer in trainers:
        kill(trainer.pid)


def trained_steps(command: Command) -> int:
    """Return the greatest step any attempt has trained."""
    return max((line.step for line in read_step_records(command.store, "runs/bard")), default=0)


def wait_for(is_there: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> bool:
    """Wait for an event of another process; False when the process ended first."""
    deadline = time.monotonic() + 120
    while not is_there():
        if process.poll() is not None:
            return is_there()
        assert time.monotonic() < deadline, f"never saw {what}"
        time.sleep(0.002)
    return True
