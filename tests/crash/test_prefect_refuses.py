"""Prefect's API refuses what is only shown, asks for a password, or was told nothing by a flow that was killed."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.prefect_api import flow_run, task_runs
from tests.crash.prefect_server import Server
from tests.crash.shown_run import flow_run_of
from tests.crash.training_command import Command, configuration
from tests.crash.victims import kill_both
from tests.processes.waiting import patience_seconds, wait_for
from tests.s3.fault_proxy import FaultProxy, NetworkFault

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHOWN_ONLY = r"/(artifacts|task_runs|logs|events)\b"


def test_a_server_that_refuses_artifacts_task_runs_logs_and_events_changes_no_bit(
    tmp_path: Path, api_url: str, undisturbed_sha256: str
) -> None:
    with FaultProxy(upstream=api_url.removesuffix("/api")) as proxy:
        proxy.aim(NetworkFault.INTERNAL_ERROR, SHOWN_ONLY, times=1_000_000)
        command = Command(tmp_path, f"{proxy.endpoint}/api", environment={"CAIRN_FAULTS": "kill@8"})
        command.train()
    refused = {found.group() for request in proxy.requests if (found := re.search(SHOWN_ONLY, request))}
    assert {"/artifacts", "/events"} <= refused, refused
    assert command.state_sha256() == undisturbed_sha256
    assert command.reasons() == ["lost", "completed"]
    assert flow_run(api_url, flow_run_of(command))["state_name"] == "Completed"
    assert command.champion() is not None


PASSWORD = "admin:canary-of-auth"


@pytest.fixture(scope="module")
def guarded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = Server(tmp_path_factory.mktemp("guarded"), PREFECT_SERVER_API_AUTH_STRING=PASSWORD)
    yield server.url
    server.stop()


def trained(folder: Path, api_url: str, **environment: str) -> tuple[int, str]:
    command = Command(folder, api_url, environment=environment)
    (folder / "run.toml").write_text(configuration(steps=5, every_commits=1))
    return command.start().wait(timeout=patience_seconds()), command.output()


def test_a_run_that_gives_the_password_works_and_does_not_repeat_it(guarded_url: str, tmp_path: Path) -> None:
    code, printed = trained(tmp_path, guarded_url, PREFECT_API_AUTH_STRING=PASSWORD)
    assert (code, "canary" in printed) == (0, False), printed


@pytest.mark.parametrize("given", ["", "admin:another"])
def test_a_run_that_does_not_is_refused_in_one_line_and_claims_nothing(
    guarded_url: str, tmp_path: Path, given: str
) -> None:
    code, printed = trained(tmp_path, guarded_url, PREFECT_API_AUTH_STRING=given)
    refused = [line for line in printed.splitlines() if line.startswith("cairn: ")]
    assert (code, len(refused), "Traceback" in printed) == (2, 1, False), printed
    assert "set PREFECT_API_AUTH_STRING" in refused[0] and not (tmp_path / "store" / "runs").exists()


def test_a_run_with_a_server_of_its_own_and_a_password_for_it_works(tmp_path: Path) -> None:
    code, printed = trained(tmp_path, "", PREFECT_SERVER_API_AUTH_STRING=PASSWORD)
    assert (code, "canary" in printed) == (0, False), printed


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
