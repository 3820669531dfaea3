"""`make up` is told to stop while a run is at work: the run commits, and what is asked for meanwhile waits."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.started_up import ROOT, StartedUp
from tests.processes.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("up")]
VENV = Path(sys.executable).parents[1]
MAKE = ("make", "-C", str(ROOT), "-o", f"{VENV}/.current", f"VENV={VENV}", "up")
"""`make up` with the environment that there is, however old."""
POLLS_OFTEN = {"PREFECT_WORKER_QUERY_SECONDS": "0.2"}


def asked_for(up: StartedUp, run_id: str, steps: int) -> dict[str, Any]:
    """Return what is posted to start a flow run of `train-gpt`."""
    overrides = [f"training.steps={steps}"]
    return {"parameters": {"config": str(up.config), "run_id": run_id, "overrides": overrides}}


def newest(up: StartedUp, run_id: str) -> dict[str, Any]:
    return next(item for item in up.flow_runs("train-gpt") if item["parameters"]["run_id"] == run_id)


def test_make_lets_the_run_commit_and_what_is_asked_for_meanwhile_begins_after_the_next_start(tmp_path: Path) -> None:
    up = StartedUp(tmp_path, command=MAKE, **POLLS_OFTEN)
    try:
        deployments = {item["name"]: item["id"] for item in up.ask("api/deployments/filter", {})}
        path, headers = f"api/deployments/{deployments['train-gpt']}/create_flow_run", up.credentials()
        up.ask(path, asked_for(up, "bard", 100_000), headers)
        wait_until(lambda: len(up.state("bard").checkpoints) > 1, "a commit", up.output)
        (trainer,) = [process for process in up.processes() if "cairn.tasks.trainer.trainer" in process.cmdline()]
        trainer.suspend()  # so that the run cannot leave before it was asked for the next one
        up.send(signal.SIGTERM)
        wait_until(lambda: "waiting for the run" in up.output(), "that the run is told", up.output)
        up.ask(path, asked_for(up, "later", 10), headers)
        trainer.resume()
    finally:
        up.stop(signal.SIGTERM)
    assert up.processes() == [], up.output()
    state = up.state("bard")
    (attempt,) = state.attempts
    assert attempt.ended is not None and state.newest_committed is not None
    assert (attempt.ended.reason, attempt.ended.last_step) == ("preempted", state.newest_committed.committed.step)

    again = StartedUp(tmp_path, PORT=str(up.port), **POLLS_OFTEN)
    try:
        wait_until(lambda: newest(again, "later")["end_time"] is not None, "the end of what waited", again.output)
        assert newest(again, "later")["state_name"] == "Completed"
    finally:
        again.stop(signal.SIGTERM)
