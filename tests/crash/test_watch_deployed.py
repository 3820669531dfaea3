"""Continued through its deployment: one flow run however many watchers, on a schedule that fires, by a real worker."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crash.training_command import Command
from tests.crash.victims import kill_flow, trained_steps, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
Prefect = Callable[..., None]


@pytest.fixture
def prefect(command: Command, api_url: str) -> Prefect:
    """The `prefect` command, as `make up` uses it, for this test's store."""
    environment = {
        **os.environ,
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(command.folder / "prefect"),
        "CAIRN_ROOT": str(command.folder),
        "CAIRN_STORE": str(command.folder / "store"),
        "CAIRN_CACHE": str(command.folder / "cache"),
    }

    def run(*arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture
def deployed(prefect: Prefect) -> None:
    """The work pool and both deployments."""
    prefect("work-pool", "create", "cairn", "--type", "process", "--overwrite")
    prefect("--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")


def flow_runs(api_url: str, flow: str) -> list[dict[str, Any]]:
    body = json.dumps({"flows": {"name": {"any_": [flow]}}}).encode()
    request = urllib.request.Request(
        f"{api_url}/flow_runs/filter", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)
    return found


@pytest.mark.usefixtures("deployed")
def test_the_schedule_of_watch_runs_fires(api_url: str) -> None:
    deadline = time.monotonic() + 120
    while not any(item["state_type"] == "SCHEDULED" for item in flow_runs(api_url, "watch-runs")):
        assert time.monotonic() < deadline, "Prefect has scheduled nothing"
        time.sleep(0.5)


@pytest.mark.usefixtures("deployed")
def test_two_watchers_create_one_flow_run_and_a_worker_ends_the_run_with_the_undisturbed_bits(
    command: Command, api_url: str, prefect: Prefect, undisturbed_sha256: str, tmp_path: Path
) -> None:
    process = command.start()
    wait_for(lambda: trained_steps(command) >= 12, process, "step 12")
    kill_flow(process)
    process.wait()
    before = {item["id"] for item in flow_runs(api_url, "train-gpt")}
    look = ("watch", "--once", "--json", "--deployment", "train-gpt/train-gpt")
    watchers = [command.start_verb(*look, CAIRN_CACHE=str(tmp_path / machine)) for machine in "ab"]
    assert [watcher.wait(timeout=60) for watcher in watchers] == [0, 0]
    created = [item for item in flow_runs(api_url, "train-gpt") if item["id"] not in before]
    assert [item["name"] for item in created] == ["bard · continued after attempt 1"]
    prefect("worker", "start", "--pool", "cairn", "--run-once")
    assert command.state_sha256() == undisturbed_sha256
    assert len(command.state().attempts) == 2
