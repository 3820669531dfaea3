"""Continued through its deployment: one flow run however many watchers, on a schedule that fires, by a real worker."""

import time
from pathlib import Path

import pytest

from tests.crash.prefect_api import Prefect, flow_runs
from tests.crash.training_command import Command
from tests.crash.victims import kill_flow, trained_steps, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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
