"""Prefect's API answers, but with errors: whatever is only shown there may fail, training and its bits may not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.storage.logs.registry import Registry
from tests.crash.prefect_api import ask
from tests.crash.refusing_api import RefusingApi
from tests.crash.shown_run import flow_run_of
from tests.crash.training_command import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHOWN_ONLY = r"/(artifacts|task_runs|logs|events)\b"


@pytest.fixture
def refusing(api_url: str) -> Iterator[RefusingApi]:
    """The API without artifacts, task runs, logs and events."""
    api = RefusingApi(api_url, SHOWN_ONLY)
    yield api
    api.close()


def test_a_server_that_refuses_artifacts_task_runs_logs_and_events_changes_no_bit(
    tmp_path: Path, api_url: str, refusing: RefusingApi, undisturbed_sha256: str
) -> None:
    command = Command(tmp_path, refusing.url, environment={"CAIRN_FAULTS": "kill@8"})
    command.train()
    assert {"/artifacts", "/events"} <= set(refusing.counts), refusing.counts
    assert command.state_sha256() == undisturbed_sha256
    assert [attempt.ended.reason for attempt in command.state().attempts if attempt.ended] == ["lost", "completed"]
    shown = ask(api_url, "flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_of(command)]}}})
    assert [item["state_name"] for item in shown] == ["Completed"]
    assert Registry(command.store, "champion").refresh().champion is not None
