"""Two trainers of one run: exactly one commits each step, the other is fenced and says so."""

import os
import signal

import pytest

from cairn.storage.logs.step_log import silent_seconds
from tests.crash.training_command import RUN, STEPS, Command
from tests.crash.victims import trainers_of
from tests.processes.waiting import patience_seconds, wait_until

SILENT_SECONDS = 4.0
"""Longer than the lease and than so many heartbeats that a fresh one is believed."""


@pytest.mark.slow  # quick witness: the protocol's suites, where every fenced owner is refused, and test_exit_codes.py
def test_a_zombie_that_wakes_after_its_successor_finished_is_fenced_and_says_so(
    command: Command, undisturbed_sha256: str
) -> None:
    zombie = command.train_until(12)
    zombie_output = command.folder / "command-1.txt"
    asleep = [zombie.pid, *(trainer.pid for trainer in trainers_of(zombie))]
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    # A person's command leaves an owner alone whose last heartbeat is fresh, and a loaded machine stops it late.
    wait_until(lambda: (silent_seconds(command.store, f"runs/{RUN}", 1) or 0.0) > SILENT_SECONDS, "a silent owner")
    command.train()
    command.let_go("pause@12")
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    assert zombie.wait(timeout=patience_seconds()) == 7
    assert "fenced" in zombie_output.read_text() or "ended by somebody else" in zombie_output.read_text()
    committed = [record.committed.step for record in command.state().checkpoints]
    assert len(committed) == len(set(committed)), "each step is committed once"
    assert committed[-1] == STEPS
    assert command.state_sha256() == undisturbed_sha256


@pytest.mark.slow  # quick witness: tests/crash/test_exit_codes.py, a live owner leaves with 7
def test_a_second_command_leaves_a_live_owner_alone(command: Command) -> None:
    few = ("--set", "training.steps=5", "--set", "lease.seconds=60")  # its next beat is soon enough: a disk may be slow
    owner = command.train_until(2, *few)
    command.train(*few, exit_code=7)
    assert "attempt 1" in command.output()
    command.let_go("pause@2")
    assert owner.wait(timeout=patience_seconds()) == 0
    assert len(command.state().attempts) == 1


@pytest.mark.slow
def test_the_same_command_on_a_finished_run_changes_nothing(command: Command) -> None:
    command.train()
    before = command.state()
    command.train()
    assert command.state() == before, "nothing was appended"
