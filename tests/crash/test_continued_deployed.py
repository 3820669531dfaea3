"""A deployed run whose configuration alone names its store and its evaluator: as good after a preemption or a kill."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from urllib.request import Request, urlopen

import pytest

from tests.crash.prefect_api import Prefect, ask, environment_of, launch, prefect_command, start_beside, work
from tests.crash.training_command import Command, configuration
from tests.processes.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the parameters alone: tests/crash/test_continued_launch.py
ONLY_HERE = """
[[evaluation.evaluators]]
name = "exam"
command = ["{python}", "-c", "print('{{\\"metrics\\": {{\\"grade\\": 1.0}}}}')"]
required = true
"""


@pytest.fixture
def prefect(command: Command, api_url: str) -> Prefect:
    """The `prefect` command of a worker that knows of no store; the configuration names one, and an evaluator."""
    text = configuration() + ONLY_HERE.format(python=sys.executable)
    (command.folder / "run.toml").write_text(f'store = "store"\n{text}')
    return prefect_command(command, api_url, CAIRN_STORE="")


@pytest.fixture
def launched(command: Command, prefect: Prefect, deployed: None) -> Prefect:
    """Its deployments, and the run, launched."""
    launch(prefect, command, run_id="bard")
    return prefect


def require_as_good(command: Command, undisturbed_sha256: str) -> None:
    assert command.state_sha256() == undisturbed_sha256
    evaluated = {item.suite: item.step for item in command.state().evaluations}
    assert evaluated["exam"] == 60
    assert command.champion() is not None


def test_a_preempted_run_is_evaluated_and_promoted_as_its_configuration_says(
    command: Command, launched: Prefect, undisturbed_sha256: str
) -> None:
    work(launched, CAIRN_FAULTS="preempt@12")
    work(launched)
    assert len(command.state().attempts) == 2
    require_as_good(command, undisturbed_sha256)


def test_a_killed_run_is_found_by_watch_runs_in_the_store_that_its_configuration_names(
    command: Command, launched: Prefect, undisturbed_sha256: str
) -> None:
    def kill() -> None:
        wait_until(lambda: command.has_met("pause@12"), "step 12")
        os.kill(command.state().attempts[0].started.placement.pid, signal.SIGKILL)

    with ThreadPoolExecutor(1) as beside:
        killed = beside.submit(kill)
        work(launched, CAIRN_FAULTS="pause@12")
        killed.result()
    launched("deployment", "run", "watch-runs/watch-runs")
    work(launched)  # the watcher
    work(launched)  # the continuation
    assert len(command.state().attempts) == 2
    require_as_good(command, undisturbed_sha256)


def test_a_deployment_of_one_flow_run_that_cancels_others_runs_the_successor_all_the_same(
    command: Command, launched: Prefect, api_url: str
) -> None:
    (deployment,) = ask(api_url, "deployments/filter", {"deployments": {"name": {"any_": ["train-gpt"]}}})
    limited = {"concurrency_limit": 1, "concurrency_options": {"collision_strategy": "CANCEL_NEW"}}
    patch = Request(f"{api_url}/deployments/{deployment['id']}", json.dumps(limited).encode(), method="PATCH")
    patch.add_header("Content-Type", "application/json")
    with urlopen(patch) as answer:
        assert answer.status == HTTPStatus.NO_CONTENT
    environment = environment_of(command, api_url, CAIRN_STORE="", CAIRN_FAULTS="preempt@12")
    with start_beside(command, environment, "worker", "prefect", "worker", "start", "--pool", "cairn") as worker:
        wait_until(lambda: command.state().finished is not None, "the end of the run")
        wait_until(lambda: command.state().open_attempt is None, "its receipt")
        worker.terminate()
    assert len(command.state().attempts) == 2
