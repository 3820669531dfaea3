"""Name, tags and log of a deployed flow run, set on a real server by the process that is the flow run."""

from typing import Any
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.names import generate_slug

from cairn.flows.orchestrator import flow_run_tags

pytestmark = pytest.mark.xdist_group("deployment-steps")


@pytest.fixture
def made(client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FlowRun:
    """A flow run of a deployment that this process takes itself for, with the name that the test gives."""
    flow_id = client.create_flow_from_name(f"train-{uuid4().hex[:8]}")
    deployment_id = client.create_deployment(flow_id=flow_id, name="train-gpt")
    named: dict[str, Any] = {"name": request.param} if getattr(request, "param", "") else {}
    flow_run = client.create_flow_run_from_deployment(deployment_id, tags=["mine", "reason:bad-data"], **named)
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(flow_run.id))
    return flow_run


@pytest.mark.parametrize(
    ("made", "name"),
    [("", "bard"), ("my own", "my own"), ("first-try", "first-try"), ("bard, attempt 2", "bard, attempt 2")],
    indirect=["made"],
)
def test_a_flow_run_gets_its_name_from_its_parameters_unless_a_person_has_named_it(
    client: SyncPrefectClient, made: FlowRun, name: str
) -> None:
    is_kept = flow_run_tags.introduce("bard", "run:bard")
    shown = client.read_flow_run(made.id)
    assert (shown.name, sorted(shown.tags), is_kept) == (name, ["mine", "run:bard"], not name.startswith("bard"))


def test_every_name_that_prefect_makes_up_is_known_as_such() -> None:
    assert [name for name in (generate_slug(2) for _ in range(100)) if not flow_run_tags.is_made_up(name)] == []
