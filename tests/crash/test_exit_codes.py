"""The exit codes that only a command with an orchestrator leaves with, from stores made by hand: nothing is trained.

4: ending a lost attempt spends the last of its budget. 7: the owner shows life. The others of CONTRACT come from real
commands in tests/flows (0, 1, 2, 3, 5, 6, 75, 130) and, after real training, beside this file (0, 4, 7, 75, 130).
"""

import signal
from pathlib import Path

import pytest

from tests.crash.live_owner import QUICK_BEATS, beating
from tests.crash.short_lived_api import ShortLivedApi
from tests.crash.training_command import Command
from tests.entries import gone_placement
from tests.fabricated_run import fabricate
from tests.processes.waiting import patience_seconds, wait_for


def continued(command: Command, *extra: str) -> int:
    return command.start_verb("train", "--run-id", "bard", *QUICK_BEATS, *extra).wait(timeout=patience_seconds())


def test_a_spent_budget_leaves_with_4_and_says_which(command: Command) -> None:
    fabricate(command.store, "bard").start(placement=gone_placement())
    assert continued(command, "--set", "budgets.lost.retries=0") == 4, command.output()
    ended = command.receipts()[-1]
    assert (ended.reason, ended.decision.action) == ("lost", "stop")
    assert "lost" in command.output() and "Traceback" not in command.output()


def test_a_live_owner_leaves_with_7_and_says_where_it_is(command: Command) -> None:
    run = fabricate(command.store, "bard")
    run.start(host="elsewhere")
    with beating(run):
        assert continued(command) == 7, command.output()
    assert "attempt 1 on elsewhere" in command.output() and "Traceback" not in command.output()
    assert command.state().open_attempt is not None


def test_a_command_told_to_go_after_it_has_said_why_it_leaves_keeps_its_code(command: Command) -> None:
    run = fabricate(command.store, "bard")
    run.start(host="elsewhere")
    with beating(run):
        process = command.start_verb("train", "--run-id", "bard", *QUICK_BEATS)
        wait_for(lambda: "attempt 1 on elsewhere" in command.output(), process, "the refusal")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=patience_seconds()) == 7, command.output()


@pytest.mark.slow  # quick witness: `tests/crash/test_ephemeral_server.py`, killed while the run trains
def test_a_server_that_dies_after_its_first_answer_changes_no_exit_code(tmp_path: Path) -> None:
    command = Command(tmp_path, ShortLivedApi().url, environment={"PREFECT_CLIENT_MAX_RETRIES": "1"})
    fabricate(command.store, "bard").start(placement=gone_placement())
    assert continued(command, "--set", "budgets.lost.retries=0") == 4, command.output()
    assert "Traceback" not in command.output()
