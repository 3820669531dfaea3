"""Notices that this machine will be taken away: with enough grace nothing is done twice, with too little it is said."""

import signal
from pathlib import Path

import pytest

from tests.crash.training_command import ARCHITECTURES, Command
from tests.processes.waiting import patience_seconds, wait_for

NOTICES = (7, 33)


@pytest.mark.slow  # quick witnesses: test_injected_faults.py, the preempted step itself was committed, and its bits
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_notice_with_enough_grace_commits_its_very_step_and_no_step_is_done_twice(
    tmp_path: Path, api_url: str, architecture: str, undisturbed_sha256: str
) -> None:
    faults = ",".join(f"preempt@{step}" for step in NOTICES)
    command = Command(tmp_path, api_url, environment={"CAIRN_FAULTS": faults}, architecture=architecture)
    for _ in NOTICES:
        command.train(exit_code=75)
    command.train()
    attempts = command.state().attempts
    resumed = [attempt.started.resumed_from for attempt in attempts]
    assert [reference.step for reference in resumed if reference is not None] == list(NOTICES)
    assert [attempt.ended.last_step for attempt in attempts if attempt.ended] == [*NOTICES, 60]
    assert command.state_sha256() == undisturbed_sha256


@pytest.mark.slow
def test_too_little_grace_is_said_in_the_receipt_and_the_last_regular_commit_is_resumed_from(
    command: Command, undisturbed_sha256: str
) -> None:
    process = command.train_until(23, "--set", "checkpoint.grace_seconds=0.001", "--set", "checkpoint.every_steps=20")
    wait_for(lambda: command.state().newest_committed is not None, process, "step 20 committed", command.output)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=patience_seconds()) == 75
    ended = command.state().attempts[0].ended
    assert ended is not None
    assert "the grace period was too short" in ended.detail
    command.train()
    resumed = command.state().attempts[1].started.resumed_from
    assert resumed is not None
    assert resumed.step == 20
    assert command.state_sha256() == undisturbed_sha256


@pytest.mark.slow
@pytest.mark.parametrize("source", ["file", "signal"])
def test_a_notice_of_another_kind_ends_the_run_in_the_same_good_order(command: Command, source: str) -> None:
    notice = command.folder / "leave"
    extra = {"file": f"preemption.notice_file={notice}", "signal": "preemption.signal=SIGUSR1"}[source]
    process = command.train_until(3, "--set", extra, "--set", "preemption.poll_seconds=0.1")
    if source == "file":
        notice.write_text("terminate at noon\n")
    else:
        process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=patience_seconds()) == 75
    state = command.state()
    ended, newest = state.attempts[0].ended, state.newest_committed
    assert ended is not None
    assert newest is not None
    assert (ended.reason, ended.last_step) == ("preempted", newest.committed.step)
    assert {"file": "terminate at noon", "signal": "SIGUSR1"}[source] in ended.detail
