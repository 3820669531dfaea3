"""`make up` a second time: it keeps what a person has set since, and says so."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.started_up import StartedUp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("up")]
# Quick witness: tests/crash/test_deployed_again.py, with twenty settings and a change of the code.


def deployment(up: StartedUp, name: str) -> dict[str, Any]:
    (found,) = [item for item in up.ask("api/deployments/filter", {}) if item["name"] == name]
    return dict(found)


def test_what_a_person_has_set_is_kept_by_the_next_start_which_names_it(tmp_path: Path) -> None:
    up = StartedUp(tmp_path)
    try:
        assert "deployment train-gpt/train-gpt: made" in up.output()
        up.ask(f"api/deployments/{deployment(up, 'sweep-checkpoints')['id']}/pause_deployment", {})
        (watching,) = [item for item in up.ask("api/deployments/filter", {}) if item["name"] == "watch-runs"]
        done = up.prefect("deployment", "schedule", "pause", "watch-runs/watch-runs", watching["schedules"][0]["id"])
        assert done.returncode == 0, done.stderr
    finally:
        up.stop(signal.SIGINT)
    again = StartedUp(tmp_path, PORT=str(up.port))
    try:
        assert "sweep-checkpoints/sweep-checkpoints: stays as a person has set it: paused" in again.output()
        assert "watch-runs/watch-runs: stays as a person has set it: schedules" in again.output()
        assert deployment(again, "sweep-checkpoints")["paused"]
        assert not deployment(again, "watch-runs")["schedules"][0]["active"]
    finally:
        again.stop(signal.SIGINT)
