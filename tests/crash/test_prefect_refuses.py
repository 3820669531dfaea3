"""Prefect's API answers, but with errors: whatever is only shown there may fail, training and its bits may not."""

import re
from pathlib import Path

import pytest

from tests.crash.prefect_api import flow_run
from tests.crash.shown_run import flow_run_of
from tests.crash.training_command import Command
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
