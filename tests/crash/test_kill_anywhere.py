"""kill -9 of the trainer, of the flow process, and of both, at random moments: the run ends with the same bits."""

import random
import subprocess
from collections.abc import Callable
from functools import partial

import psutil
import pytest

from tests.crash.training_command import STEPS, Command
from tests.crash.victims import kill_both, kill_flow, kill_trainer, trained_steps, trainers_of, wait_for

KILLS = 10


def moments(seed: int) -> list[int]:
    """Return ten random steps, in order, at which something dies."""
    return sorted(random.Random(seed).sample(range(1, STEPS), KILLS))


def train_through(command: Command, kill_something: Callable[[subprocess.Popen[bytes]], None], seed: int) -> None:
    """Run the command again and again, killing at each moment, until the run is finished."""
    process = command.start()
    for step in moments(seed):
        if process.poll() is not None:
            process = command.start()
        wait_for(partial(_is_at, command, process, step), process, f"step {step}")
        kill_something(process)
        if kill_something is not kill_trainer:
            process.wait()
    if process.poll() is None:
        process.wait(timeout=240)
    command.train()


def _is_at(command: Command, process: subprocess.Popen[bytes], step: int) -> bool:
    return trained_steps(command) >= step and bool(trainers_of(process))


def _has_claimed(command: Command, process: subprocess.Popen[bytes], attempt: int) -> bool:
    return command.state().latest_attempt >= attempt and bool(trainers_of(process))


@pytest.mark.parametrize(
    ("victim", "seed"),
    [
        pytest.param(kill_trainer, 1, marks=pytest.mark.slow),
        pytest.param(kill_flow, 2, marks=pytest.mark.slow),
        (kill_both, 3),
    ],
)
def test_ten_kills_at_random_moments_leave_the_same_bits(
    command: Command, undisturbed_sha256: str, victim: Callable[[subprocess.Popen[bytes]], None], seed: int
) -> None:
    train_through(command, victim, seed)
    assert command.state_sha256() == undisturbed_sha256
    state = command.state()
    assert len(state.attempts) >= KILLS // 2, "the kills must have cost attempts, else nothing was tested"
    assert all(attempt.ended is not None for attempt in state.attempts), "every attempt leaves a receipt"
    assert state.refused == ()


def test_two_kills_during_resume_leave_the_same_bits(command: Command, undisturbed_sha256: str) -> None:
    process = command.start()
    wait_for(lambda: trained_steps(command) >= 22, process, "step 22")
    kill_both(process)
    process.wait()
    for attempt in (2, 3):
        process = command.start()
        wait_for(partial(_has_claimed, command, process, attempt), process, "a trainer that loads")
        kill_both(process)
        process.wait()
    command.train()
    assert command.state_sha256() == undisturbed_sha256
    assert command.state().attempts[-1].started.resumed_from is not None


def test_a_killed_flow_leaves_no_orphan_trainer(command: Command, undisturbed_sha256: str) -> None:
    process = command.start()
    wait_for(lambda: trained_steps(command) >= 3, process, "step 3")
    trainers = trainers_of(process)
    kill_flow(process)
    process.wait()
    _, alive = psutil.wait_procs(trainers, timeout=10)
    assert trainers and not alive
