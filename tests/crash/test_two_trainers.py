"""Two trainers of one run: exactly one commits each step, the other is fenced and says so."""

import os
import signal
import time

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


def test_a_preempted_run_commits_its_very_step_and_loses_none(command: Command, undisturbed_sha256: str) -> None:
    process = command.start()
    wait_for(lambda: trained_steps(command) >= 13, process, "step 13")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75, command.output()
    ended = command.state().attempts[0].ended
    assert ended is not None and ended.reason == "preempted"
    newest = command.state().newest_committed
    assert newest is not None and newest.committed.step == ended.last_step, "the very step is committed"
    command.train()
    assert command.state_sha256() == undisturbed_sha256


def test_the_same_command_on_a_finished_run_changes_nothing(command: Command, undisturbed_sha256: str) -> None:
    command.train()
    before = command.state()
    started = time.monotonic()
    command.train()
    assert command.state() == before, "nothing was appended"
    assert time.monotonic() - started < 60
