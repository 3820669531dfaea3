"""A preempted run of a deployment on the session's server, for which this process takes itself."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from tests import entries


@pytest.fixture(scope="module")
def client(api_url: str) -> Iterator[SyncPrefectClient]:
    """The API of the session's server, which this process names as well."""
    with temporary_settings({PREFECT_API_URL: api_url}), get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def launch(tmp_path: Path) -> dict[str, Any]:
    """What a person has launched a run with, and what its start has added."""
    overrides = ["cost.gpu_hour_price=2.5"]
    return {"config": "quickstart", "run_id": "bard", "store": f"file://{tmp_path}", "overrides": overrides}


@pytest.fixture
def flow_run(client: SyncPrefectClient, launch: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> FlowRun:
    """A flow run of a deployment, which this process takes itself for."""
    flow_id = client.create_flow_from_name(f"train-{uuid4().hex[:8]}")
    deployment_id = client.create_deployment(flow_id=flow_id, name="train-gpt")
    made = client.create_flow_run_from_deployment(
        deployment_id, parameters=launch, tags=["mine"], job_variables={"spot": True}
    )
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(made.id))
    return made


@pytest.fixture
def log(tmp_path: Path, flow_run: FlowRun) -> RunLog:
    """A run whose only attempt was preempted in that flow run; its back-off is five minutes."""
    log = RunLog(LocalStore(tmp_path), "bard")
    log.refresh()
    ended = entries.ended(1, reason="preempted", decision=entries.decided(delay_seconds=300.0))
    log.append(lambda state: entries.opened(log.run_id), writer=entries.writer())
    log.append(lambda state: entries.started(1), writer=replace(entries.writer(), flow_run_id=str(flow_run.id)))
    log.append(lambda state: ended, writer=entries.writer(1))
    return log


def successors(client: SyncPrefectClient, flow_run: FlowRun) -> list[FlowRun]:
    """The other flow runs of its deployment."""
    assert flow_run.deployment_id is not None
    rule = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[flow_run.deployment_id]))
    return [item for item in client.read_flow_runs(flow_run_filter=rule) if item.id != flow_run.id]
