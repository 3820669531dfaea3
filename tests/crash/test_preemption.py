"""Notices that this machine will be taken away, of every kind; too little grace is said.

That the step of a notice is committed itself: test_injected_faults.py; that no bit changes: test_run_on_s3.py.
"""

import signal

import pytest

from tests.crash.training_command import Command
from tests.processes.waiting import patience_seconds, wait_for


@pytest.mark.slow
def test_too_little_grace_is_said_in_the_receipt_and_the_last_regular_commit_is_resumed_from(
    command: Command, undisturbed_sha256: str
) -> None:
    process = command.train_until(23, "--set", "checkpoint.grace_seconds=0.001", "--set", "checkpoint.every_steps=20")
    wait_for(lambda: command.state().newest_committed is not None, process, "step 20 committed", command.output)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=patience_seconds()) == 75
    ended = command.receipts()[0]
    assert "the grace period was too short" in ended.detail
    command.train()
    assert command.state().attempts[1].started.first_step == 20
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
    (ended,) = command.receipts()
    assert (ended.reason, ended.last_step) == ("preempted", command.state().resume_step)
    assert {"file": "terminate at noon", "signal": "SIGUSR1"}[source] in ended.detail
