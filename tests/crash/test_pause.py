"""Prefect's Pause, Resume and Retry of deployed runs, with real workers: one process trains, and no flow run lies."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.crash.prefect_api import ROOT, SETTLED, Prefect, ask, flow_runs
from tests.crash.training_command import Command
from tests.processes.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the states themselves: tests/crash/test_pause_states.py
SUSPENDED = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
FlowRun = dict[str, Any]


@pytest.fixture
def worker(command: Command, api_url: str, deployed: None) -> Iterator[Callable[[], str]]:
    """A worker that runs all the time; says what it has printed."""
    environment = {
        **os.environ,
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(command.folder / "prefect"),
        "CAIRN_STORE": str(command.folder / "store"),
        "CAIRN_CACHE": str(command.folder / "cache"),
        "CAIRN_FAULTS": "pause@12",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }
    with (command.folder / "worker.txt").open("wb") as output:
        process = subprocess.Popen(
            [*SETTLED, "prefect", "worker", "start", "--pool", "cairn"],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
        )
    yield lambda: (command.folder / "worker.txt").read_text(errors="replace")
    process.terminate()
    process.wait()


def launch(command: Command, prefect: Prefect, *overrides: str) -> None:
    words = ", ".join(f'"{override}"' for override in overrides)
    parameters = ("-p", f"config={command.folder / 'run.toml'}", "-p", "run_id=bard", "-p", f"overrides=[{words}]")
    prefect("deployment", "run", "train-gpt/train-gpt", *parameters)


def shown(api_url: str, command: Command) -> list[tuple[str, str]]:
    """Names and messages of the states of the run's flow runs."""
    found = [item for item in flow_runs(api_url, "train-gpt") if str(command.folder) in str(item["parameters"])]
    return [(item["state_name"], item["state"]["message"]) for item in found]


def test_pause_commits_and_stops_and_resume_continues_in_that_flow_run(
    command: Command, api_url: str, prefect: Prefect, worker: Callable[[], str], undisturbed_sha256: str
) -> None:
    launch(command, prefect)
    wait_until(lambda: command.has_met("pause@12"), "step 12", worker)
    flow_run_id = command.state().attempts[0].flow_run_id
    ask(api_url, f"flow_runs/{flow_run_id}/set_state", {"state": SUSPENDED})
    command.let_go("pause@12")
    wait_until(lambda: command.state().open_attempt is None, "the end of the attempt", worker)
    wait_until(lambda: "paused: " in str(shown(api_url, command)), "the flow run's last state", worker)
    ended = command.state().attempts[0].ended
    assert ended is not None and (ended.reason, ended.last_step) == ("cancelled", command.state().resume_step)
    assert "by Pause; Resume continues it" in ended.detail
    ask(api_url, f"flow_runs/{flow_run_id}/resume", {})
    wait_until(lambda: command.state().finished is not None, "the end of the run", worker)
    wait_until(
        lambda: shown(api_url, command)[0][0] == "Completed", "the flow run's end", lambda: str(shown(api_url, command))
    )
    assert len(shown(api_url, command)) == 1
    assert {attempt.flow_run_id for attempt in command.state().attempts} == {flow_run_id}
    assert command.state_sha256() == undisturbed_sha256


def test_a_second_process_of_a_flow_run_whose_first_one_trains_leaves_it_alone(
    command: Command, api_url: str, prefect: Prefect, worker: Callable[[], str]
) -> None:
    launch(command, prefect)
    wait_until(lambda: command.has_met("pause@12"), "step 12", worker)
    flow_run_id = command.state().attempts[0].flow_run_id
    again = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
    ask(api_url, f"flow_runs/{flow_run_id}/set_state", again)
    wait_until(
        lambda: "trains in this very flow run" in worker() or worker().count("exited") > 0, "the second one", worker
    )
    assert [name for name, _ in shown(api_url, command)] == ["Running"]
    command.let_go("pause@12")
    wait_until(lambda: command.state().finished is not None, "the end of the run", worker)
    assert len(command.state().attempts) == 1
    wait_until(
        lambda: shown(api_url, command)[0][0] == "Completed", "the flow run's end", lambda: str(shown(api_url, command))
    )
