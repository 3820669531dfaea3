"""The trainer that is started before the run can begin: no end of the command leaves it, or a server, behind."""

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.crash.live_owner import QUICK_BEATS
from tests.crash.training_command import Command
from tests.crash.victims import assert_gone, kill_flow, trainers_of
from tests.entries import gone_placement
from tests.fabricated_run import fabricate
from tests.processes.waiting import wait_for


@pytest.fixture
def alone(tmp_path: Path) -> Command:
    """A command that is told of no server, so that its trainer waits for long."""
    return Command(tmp_path, "")


def children_while(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return every process below the command that was seen until it ended."""
    seen: dict[int, psutil.Process] = {}
    while process.poll() is None:
        try:
            seen |= {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
    return list(seen.values())


def test_a_command_killed_before_its_run_begins_leaves_no_trainer(alone: Command) -> None:
    process = alone.start()
    wait_for(lambda: bool(trainers_of(process)), process, "a trainer that waits")
    trainers = trainers_of(process)
    kill_flow(process)
    assert alone.state().latest_attempt == 0
    assert_gone(trainers)


def test_a_run_that_is_refused_while_its_trainer_waits_leaves_no_process(command: Command) -> None:
    fabricate(command.store, "bard").start(placement=gone_placement())
    process = command.start_verb("train", "--run-id", "bard", *QUICK_BEATS, "--set", "budgets.lost.retries=0")
    seen = children_while(process)
    assert process.returncode == 4, command.output()
    assert_gone(seen)
