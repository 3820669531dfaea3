"""kill -9 of the trainer, of the flow process, and of both, at random steps: the run ends with the same bits."""

import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest

from tests.crash.training_command import ARCHITECTURES, STEPS, Command
from tests.crash.victims import kill_both, kill_flow, kill_trainer, trainers_of
from tests.processes.waiting import patience_seconds

pytestmark = pytest.mark.xdist_group("killed")  # its run is made once for all its tests
Kill = Callable[["subprocess.Popen[bytes]"], None]
KILLS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class KilledRun:
    """The command that ended a run, and how many trainers its killed flow had and left."""

    command: Command
    trainers: int
    orphans: int


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


@pytest.mark.slow  # quick witnesses: the tests below, and test_injected_faults.py for a killed trainer
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("victim", "seed"), [(kill_trainer, 1), (kill_flow, 2), (kill_both, 3)])
def test_kills_after_random_steps_leave_the_same_bits(
    command: Command, undisturbed_sha256: str, victim: Kill, seed: int
) -> None:
    train_through(command, victim, sorted(random.Random(seed).sample(range(1, STEPS), KILLS)))
    assert command.state_sha256() == undisturbed_sha256
    assert len(command.receipts()) == KILLS + 1, "each kill costs an attempt, and each leaves a receipt"
    assert command.state().refused == ()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> KilledRun:
    """A run whose flow was killed, then flow and trainer twice during resume."""
    command = Command(tmp_path_factory.mktemp("killed"), api_url)
    process = command.train_until(22)
    trainers = trainers_of(process)
    kill_flow(process)
    _, orphans = psutil.wait_procs(trainers, timeout=patience_seconds())
    for fault in ("pause-load@2", "pause-load@3"):
        process = command.start(CAIRN_FAULTS=fault)
        command.wait_for_fault(fault, process)
        kill_both(process)
    command.train()
    return KilledRun(command=command, trainers=len(trainers), orphans=len(orphans))


def test_two_kills_during_resume_leave_the_same_bits(killed: KilledRun, undisturbed_sha256: str) -> None:
    assert killed.command.state_sha256() == undisturbed_sha256
    attempts = killed.command.state().attempts
    assert len(attempts) == 4 and attempts[-1].started.resumed_from is not None


def test_a_killed_flow_leaves_no_orphan_trainer(killed: KilledRun) -> None:
    assert (killed.trainers, killed.orphans) == (1, 0)


def test_every_attempt_of_a_killed_run_leaves_a_receipt_and_nothing_is_refused(killed: KilledRun) -> None:
    assert killed.command.reasons() == ["lost"] * 3 + ["completed"]
    assert killed.command.state().refused == ()
