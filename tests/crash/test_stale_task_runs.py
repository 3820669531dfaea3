"""A killed flow tells Prefect nothing: the flow that goes on in its place ends what it left as Running."""

import pytest

from tests.crash.prefect_api import flow_run, task_runs
from tests.crash.training_command import Command
from tests.crash.victims import kill_both
from tests.processes.waiting import wait_for

pytestmark = pytest.mark.slow


def unfinished(api_url: str, flow_run_id: str) -> list[str]:
    return [item["name"] for item in task_runs(api_url, flow_run_id) if item["state_type"] in ("RUNNING", "PENDING")]


def test_what_a_killed_flow_left_running_is_closed_by_the_next(command: Command, api_url: str) -> None:
    process = command.train_until(12)
    killed = command.state().attempts[0].flow_run_id
    assert killed is not None
    wait_for(lambda: bool(unfinished(api_url, killed)), process, "a task run at work")
    kill_both(process)
    command.train()
    assert unfinished(api_url, killed) == []
    shown = flow_run(api_url, killed)
    assert (shown["state_type"], shown["state_name"]) == ("CRASHED", "Crashed")
    assert str(command.state().attempts[-1].flow_run_id) in shown["state"]["message"]
    states = {item["state_name"] for item in task_runs(api_url, killed)}
    assert "Lost" in states and "Completed" in states
