"""Two trainers of one run: exactly one commits each step, the other is fenced and says so."""

import os
import signal
import time

import pytest

from tests.crash.training_command import STEPS, Command
from tests.crash.victims import trained_steps, trainers_of, wait_for


def test_a_zombie_that_wakes_after_its_successor_finished_is_fenced_and_says_so(
    command: Command, undisturbed_sha256: str
) -> None:
    zombie = command.start()
    zombie_output = command.folder / "command-1.txt"
    wait_for(lambda: trained_steps(command) >= 12, zombie, "step 12")
    asleep = [zombie.pid, *(trainer.pid for trainer in trainers_of(zombie))]
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    command.train()
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    assert zombie.wait(timeout=60) == 7
    assert "fenced" in zombie_output.read_text() or "ended by somebody else" in zombie_output.read_text()
    committed = [record.committed.step for record in command.state().checkpoints]
    assert len(committed) == len(set(committed)), "each step is committed once"
    assert committed[-1] == STEPS
    assert command.state_sha256() == undisturbed_sha256


def test_a_second_command_leaves_a_live_owner_alone(command: Command, undisturbed_sha256: str) -> None:
    owner = command.start()
    wait_for(lambda: trained_steps(command) >= 2 and bool(trainers_of(owner)), owner, "step 2")
    trainer = trainers_of(owner)[0]
    trainer.suspend()  # so that the owner is still there when the second command has started up
    command.train(exit_code=7)
    assert "attempt 1" in command.output()
    trainer.resume()
    assert owner.wait(timeout=120) == 0
    assert len(command.state().attempts) == 1


@pytest.mark.slow
def test_the_same_command_on_a_finished_run_changes_nothing(command: Command, undisturbed_sha256: str) -> None:
    command.train()
    before = command.state()
    started = time.monotonic()
    command.train()
    assert command.state() == before, "nothing was appended"
    assert time.monotonic() - started < 60
