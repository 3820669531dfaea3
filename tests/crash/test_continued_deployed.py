"""A deployed run whose configuration alone names its store and its evaluator: as good after a preemption or a kill."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from urllib.request import Request, urlopen

import pytest

from cairn.storage.logs.registry import Registry
from tests.crash.prefect_api import ROOT, SETTLED, ask
from tests.crash.training_command import Command, configuration
from tests.processes.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the parameters alone: tests/crash/test_continued_launch.py
ONLY_HERE = """
[[evaluation.evaluators]]
name = "exam"
command = ["{python}", "-c", "print('{{\\"metrics\\": {{\\"grade\\": 1.0}}}}')"]
required = true
"""
Prefect = Callable[..., None]


@pytest.fixture
def environment(command: Command, api_url: str) -> Mapping[str, str]:
    """The environment of a worker that knows of no store."""
    given = {"PREFECT_API_URL": api_url, "PREFECT_HOME": str(command.folder / "prefect")}
    kept = {name: value for name, value in os.environ.items() if name != "CAIRN_STORE"}
    return kept | given | {"CAIRN_CACHE": str(command.folder / "cache")}


@pytest.fixture
def prefect(command: Command, environment: Mapping[str, str]) -> Prefect:
    """The `prefect` command there; the configuration names a store and an evaluator that promotion needs."""
    text = configuration() + ONLY_HERE.format(python=sys.executable)
    (command.folder / "run.toml").write_text(f'store = "store"\n{text}')

    def run(*arguments: str, **variables: str) -> None:
        words = [*SETTLED, "prefect", *arguments]
        subprocess.run(words, cwd=ROOT, env={**environment, **variables}, check=True, timeout=240)

    return run


@pytest.fixture
def launched(command: Command, prefect: Prefect, deployed: None) -> Prefect:
    """Its deployments, and the run, launched."""
    parameters = ("-p", f"config={command.folder / 'run.toml'}", "-p", "run_id=bard")
    prefect("deployment", "run", "train-gpt/train-gpt", *parameters)
    return prefect


def work(prefect: Prefect, **variables: str) -> None:
    prefect("worker", "start", "--pool", "cairn", "--run-once", **variables)


def require_as_good(command: Command, undisturbed_sha256: str) -> None:
    assert command.state_sha256() == undisturbed_sha256
    evaluated = {item.suite: item.step for item in command.state().evaluations}
    assert evaluated["exam"] == 60
    assert Registry(command.store, "champion").refresh().champion is not None


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
    command: Command, launched: Prefect, api_url: str, environment: Mapping[str, str]
) -> None:
    (deployment,) = ask(api_url, "deployments/filter", {"deployments": {"name": {"any_": ["train-gpt"]}}})
    limited = {"concurrency_limit": 1, "concurrency_options": {"collision_strategy": "CANCEL_NEW"}}
    patch = Request(f"{api_url}/deployments/{deployment['id']}", json.dumps(limited).encode(), method="PATCH")
    patch.add_header("Content-Type", "application/json")
    with urlopen(patch) as answer:
        assert answer.status == HTTPStatus.NO_CONTENT
    words = [*SETTLED, "prefect", "worker", "start", "--pool", "cairn"]
    standing = {**environment, "CAIRN_FAULTS": "preempt@12", "PREFECT_WORKER_QUERY_SECONDS": "1"}
    with subprocess.Popen(words, cwd=ROOT, env=standing) as worker:
        wait_until(lambda: command.state().finished is not None, "the end of the run")
        wait_until(lambda: command.state().open_attempt is None, "its receipt")
        worker.terminate()
    assert len(command.state().attempts) == 2
