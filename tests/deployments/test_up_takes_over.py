"""`make up` takes the home of commands' temporary servers over: their runs are on its pages, and none of them ends."""

import signal
import stat
from pathlib import Path

import pytest

from tests.crash.prefect_server import copy_untouched_database
from tests.crash.training_command import Command
from tests.deployments.started_up import StartedUp
from tests.processes.waiting import patience_seconds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("up")]
# Quick witness: test_a_temporary_server_ends_when_make_up_asks_for_its_home in tests/flows/test_session_server.py.


def shown(up: StartedUp) -> dict[str, str]:
    return {item["parameters"]["run_id"]: item["state_name"] for item in up.flow_runs("train-gpt")}


def test_it_shows_what_was_trained_before_and_a_run_under_way_goes_on(tmp_path: Path) -> None:
    copy_untouched_database(tmp_path)
    command = Command(tmp_path, "")
    before = command.start_verb("train", "run.toml", "--run-id", "before", "--set", "training.steps=5")
    assert before.wait(timeout=patience_seconds()) == 0, command.output()
    process = command.train_until(12)
    up = StartedUp(tmp_path)
    try:
        assert shown(up)["before"] == "Completed"
        assert stat.S_IMODE(up.key.stat().st_mode) == 0o600
        command.let_go("pause@12")
        assert process.wait(timeout=patience_seconds()) == 0, command.output()
        later = command.start_verb("train", "run.toml", "--run-id", "later", "--set", "training.steps=5")
        assert later.wait(timeout=patience_seconds()) == 0, command.output()
        assert "temporary" not in command.output() and shown(up)["later"] == "Completed"
    finally:
        code = up.stop(signal.SIGTERM)
    assert (code, up.processes(), up.key.exists()) == (0, [], False), up.output()
    assert [attempt.ended and attempt.ended.reason for attempt in command.state().attempts] == ["completed"]
