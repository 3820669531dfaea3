"""Notices that this machine will be taken away: with enough grace nothing is done twice, with too little it is said."""

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.crash.training_command import Command
from tests.crash.victims import trained_steps, wait_for

NOTICES = (7, 19, 33, 48)


def test_every_notice_with_enough_grace_commits_its_very_step_and_no_step_is_done_twice(
    tmp_path: Path, api_url: str, undisturbed_sha256: str
) -> None:
    faults = ",".join(f"preempt@{step}" for step in NOTICES)
    command = Command(tmp_path, api_url, environment={"CAIRN_FAULTS": faults})
    for _ in NOTICES:
        command.train(exit_code=75)
    command.train()
    attempts = command.state().attempts
    resumed = [attempt.started.resumed_from for attempt in attempts]
    assert [reference.step for reference in resumed if reference is not None] == list(NOTICES)
    assert [attempt.ended.last_step for attempt in attempts if attempt.ended] == [*NOTICES, 60]
    assert [attempt.ended.wasted_gpu_seconds < 1.0 for attempt in attempts[:-1] if attempt.ended] == [True] * 4
    assert command.state_sha256() == undisturbed_sha256


@pytest.mark.slow
def test_too_little_grace_is_said_in_the_receipt_and_the_last_regular_commit_is_resumed_from(
    command: Command, undisturbed_sha256: str
) -> None:
    process = command.start("--set", "checkpoint.grace_seconds=0.001", "--set", "checkpoint.every_steps=20")
    wait_for(partial(_has_trained, command, 23), process, "step 23")
    wait_for(partial(_has_committed, command, 20), process, "step 20 committed")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
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
    process = command.start("--set", extra, "--set", "preemption.poll_seconds=0.1")
    wait_for(partial(_has_trained, command, 3), process, "step 3")
    if source == "file":
        notice.write_text("terminate at noon\n")
    else:
        process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 75
    state = command.state()
    ended, newest = state.attempts[0].ended, state.newest_committed
    assert ended is not None
    assert newest is not None
    assert (ended.reason, ended.last_step) == ("preempted", newest.committed.step)
    assert {"file": "terminate at noon", "signal": "SIGUSR1"}[source] in ended.detail


def _has_trained(command: Command, step: int) -> bool:
    return trained_steps(command) >= step


def _has_committed(command: Command, step: int) -> bool:
    newest = command.state().newest_committed
    return newest is not None and newest.committed.step >= step
