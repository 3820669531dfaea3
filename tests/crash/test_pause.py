"""Prefect's Pause, Resume and Retry of deployed runs, with real workers: one process trains, and no flow run lies."""

import os
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.crash.prefect_api import Prefect, ask, environment_of, flow_run, launch, start_beside
from tests.crash.training_command import Command
from tests.processes.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # states alone: tests/crash/test_deployed_flow_run.py


@pytest.fixture
def worker(command: Command, api_url: str, deployed: None) -> Iterator[Callable[[], str]]:
    """A worker that runs all the time; says what it has printed."""
    environment = environment_of(command, api_url)
    process = start_beside(command, environment, "worker", "prefect", "worker", "start", "--pool", "cairn")
    yield lambda: (command.folder / "worker.txt").read_text(errors="replace")
    process.terminate()
    process.wait()


@pytest.fixture
def flow_run_id(command: Command, api_url: str, prefect: Prefect, worker: Callable[[], str]) -> Iterator[str]:
    """The flow run of an endless run, which trains."""
    launch(prefect, command, run_id="bard", overrides=["training.steps=1000000"])
    wait_until(lambda: command.state().newest_committed is not None, "a commit", worker)
    flow_run_id = command.state().attempts[0].flow_run_id
    assert flow_run_id is not None
    yield flow_run_id
    set_state(api_url, flow_run_id, type="CANCELLING", message="enough")
    wait_until(lambda: command.state().open_attempt is None, "the end of the run", worker)


def set_state(api_url: str, flow_run_id: str, *, force: bool = False, **state: object) -> None:
    ask(api_url, f"flow_runs/{flow_run_id}/set_state", {"state": state, "force": force})


def shown(api_url: str, flow_run_id: str) -> tuple[str, str]:
    """Name and message of the state of a flow run."""
    found = flow_run(api_url, flow_run_id)
    return found["state_name"], found["state"]["message"] or ""


def newest_lines(api_url: str, flow_run_id: str) -> str:
    rule = {"logs": {"flow_run_id": {"any_": [flow_run_id]}}, "limit": 200, "sort": "TIMESTAMP_DESC"}
    return str([line["message"] for line in ask(api_url, "logs/filter", rule)])


def engines(command: Command) -> list[psutil.Process]:
    """The processes of the worker's flow runs."""
    (worker,) = [
        process
        for process in psutil.Process().children()
        if process.environ().get("CAIRN_CACHE") == str(command.folder / "cache")
    ]
    return worker.children()


def test_pause_commits_and_stops_and_resume_continues_in_that_flow_run(
    command: Command, api_url: str, flow_run_id: str, worker: Callable[[], str]
) -> None:
    pausing = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
    set_state(api_url, flow_run_id, **pausing)
    wait_until(lambda: shown(api_url, flow_run_id)[1].startswith("paused: "), "the flow run's state", worker)
    ended = command.receipts()[0]
    assert shown(api_url, flow_run_id)[0] == "Suspended"
    assert (ended.reason, ended.last_step) == ("cancelled", command.state().resume_step)
    assert ended.detail == "a person cancelled it in Prefect, by Pause; Resume continues it"
    ask(api_url, f"flow_runs/{flow_run_id}/resume", {})
    wait_until(lambda: len(command.state().attempts) == 2, "the next attempt", worker)
    begun = command.state().attempts[1]
    assert (begun.flow_run_id, begun.started.first_step) == (flow_run_id, ended.last_step)


def test_a_second_process_of_a_flow_run_whose_first_one_trains_leaves_its_state_alone(
    command: Command, api_url: str, flow_run_id: str, worker: Callable[[], str]
) -> None:
    set_state(api_url, flow_run_id, type="SCHEDULED", name="AwaitingRetry", force=True)
    said = "it trains in this very flow run"
    wait_until(lambda: said in newest_lines(api_url, flow_run_id), "the second process", worker)
    wait_until(lambda: len(engines(command)) == 1, "the second process's end", worker)
    assert shown(api_url, flow_run_id)[0] == "Running"
    assert len(command.state().attempts) == 1 and command.state().open_attempt is not None


def test_a_flow_run_that_is_retried_while_its_successor_trains_is_cancelled_and_not_failed(
    command: Command, api_url: str, flow_run_id: str, worker: Callable[[], str]
) -> None:
    os.kill(command.state().attempts[0].started.placement.pid, signal.SIGTERM)
    wait_until(lambda: len(command.state().attempts) == 2, "the successor", worker)
    set_state(api_url, flow_run_id, type="SCHEDULED", name="AwaitingRetry", force=True)
    wait_until(lambda: shown(api_url, flow_run_id)[1].startswith("live-owner: "), "the retry's end", worker)
    assert shown(api_url, flow_run_id)[0] == "Cancelled"
    set_state(api_url, command.state().attempts[1].flow_run_id or "", type="CANCELLING")


def test_the_message_of_a_cancel_is_on_record(
    command: Command, api_url: str, flow_run_id: str, worker: Callable[[], str]
) -> None:
    set_state(api_url, flow_run_id, type="CANCELLING", message="no money left")
    wait_until(lambda: shown(api_url, flow_run_id)[1].startswith("cancelled: "), "the flow run's state", worker)
    ended = command.receipts()[0]
    assert ended.detail == "a person cancelled it in Prefect: no money left"
    assert shown(api_url, flow_run_id)[1].endswith(f"in a shell: prefect flow-run retry {flow_run_id}")
