"""kill -9 of the trainer, of the flow process, and of both, at random steps: the run ends with the same bits."""

import random
import subprocess
from collections.abc import Callable

import psutil
import pytest

from tests.crash.training_command import STEPS, Command
from tests.crash.victims import kill_both, kill_flow, kill_trainer, trainers_of
from tests.processes.waiting import patience_seconds

Kill = Callable[["subprocess.Popen[bytes]"], None]


def train_through(command: Command, kill_something: Kill, steps: list[int]) -> None:
    """Run the command again and again, killing after each of these steps, until the run is finished."""
    faults = ",".join(f"pause@{step}" for step in steps)
    process = command.start(CAIRN_FAULTS=faults)
    for step in steps:
        if process.poll() is not None:
            process = command.start(CAIRN_FAULTS=faults)
        command.wait_for_fault(f"pause@{step}", process)
        kill_something(process)
    if process.poll() is None:
        process.wait(timeout=patience_seconds())
    command.train()


@pytest.mark.parametrize(
    ("victim", "kills", "seed"),
    [
        (kill_both, 2, 3),
        pytest.param(kill_trainer, 10, 1, marks=pytest.mark.slow),
        pytest.param(kill_flow, 10, 2, marks=pytest.mark.slow),
        pytest.param(kill_both, 10, 3, marks=pytest.mark.slow),
    ],
)
def test_kills_after_random_steps_leave_the_same_bits(
    command: Command, undisturbed_sha256: str, victim: Kill, kills: int, seed: int
) -> None:
    train_through(command, victim, sorted(random.Random(seed).sample(range(1, STEPS), kills)))
    assert command.state_sha256() == undisturbed_sha256
    state = command.state()
    assert len(state.attempts) == kills + 1, "each kill costs an attempt"
    assert all(attempt.ended is not None for attempt in state.attempts), "every attempt leaves a receipt"
    assert state.refused == ()


def test_two_kills_during_resume_leave_the_same_bits(command: Command, undisturbed_sha256: str) -> None:
    faults = ("pause@22", "pause-load@2", "pause-load@3")
    for fault in faults:
        process = command.start(CAIRN_FAULTS=",".join(faults))
        command.wait_for_fault(fault, process)
        kill_both(process)
    command.train()
    assert command.state_sha256() == undisturbed_sha256
    attempts = command.state().attempts
    assert len(attempts) == 4 and attempts[-1].started.resumed_from is not None


def test_a_killed_flow_leaves_no_orphan_trainer(command: Command) -> None:
    process = command.train_until(3)
    trainers = trainers_of(process)
    kill_flow(process)
    _, alive = psutil.wait_procs(trainers, timeout=patience_seconds())
    assert trainers and not alive


def test_processes_that_the_tests_do_not_fork_continue_a_killed_run_to_the_same_bits(
    command: Command, undisturbed_sha256: str
) -> None:
    kill_both(command.train_until(13))
    started = Command(command.folder, command.api_url, forked=False)
    started.train()
    assert started.state_sha256() == undisturbed_sha256
    assert len(started.state().attempts) == 2
