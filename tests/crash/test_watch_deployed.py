"""Continued through its deployment: one flow run however many watchers, on a schedule that fires, by a real worker."""

from pathlib import Path

import pytest

from tests.crash.prefect_api import Prefect, flow_runs, work
from tests.crash.training_command import Command
from tests.crash.victims import kill_flow
from tests.processes.waiting import patience_seconds, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.usefixtures("deployed")
def test_the_schedule_of_watch_runs_fires(api_url: str) -> None:
    wait_until(
        lambda: any(item["state_type"] == "SCHEDULED" for item in flow_runs(api_url, "watch-runs")), "a scheduled run"
    )


@pytest.mark.usefixtures("deployed")
def test_two_watchers_create_one_flow_run_and_a_worker_ends_the_run_with_the_undisturbed_bits(
    command: Command, api_url: str, prefect: Prefect, undisturbed_sha256: str, tmp_path: Path
) -> None:
    kill_flow(command.train_until(12))
    before = {item["id"] for item in flow_runs(api_url, "train-gpt")}
    look = ("watch", "--once", "--json", "--deployment", "train-gpt/train-gpt")
    watchers = [command.start_verb(*look, CAIRN_CACHE=str(tmp_path / machine)) for machine in "ab"]
    assert [watcher.wait(timeout=patience_seconds()) for watcher in watchers] == [0, 0]
    created = [item for item in flow_runs(api_url, "train-gpt") if item["id"] not in before]
    assert [item["name"] for item in created] == ["bard, attempt 2"]
    work(prefect)
    assert command.state_sha256() == undisturbed_sha256
    assert len(command.state().attempts) == 2
