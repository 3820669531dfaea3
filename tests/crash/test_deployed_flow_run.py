"""A deployed flow run on a real server, set by the process that is the flow run: its name, tags and last state."""

from typing import Any
from uuid import uuid4

import pytest
from prefect import State, states
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.names import generate_slug

from cairn.flows.orchestrator import flow_run_tags
from cairn.flows.orchestrator.flow_run import _is_end_by_person, _set_last_state, shown_state
from cairn.tasks.policy.termination import FlowEnd, FlowOutcome

pytestmark = pytest.mark.xdist_group("deployment-steps")
TIMED: State[Any] = states.Suspended(timeout_seconds=300)
ASKING: State[Any] = states.Suspended(state_details={"run_input_keyset": {"schema": "a", "response": "b"}})


@pytest.mark.parametrize(
    ("reason", "before", "after"),
    [
        (FlowOutcome.PAUSED, TIMED, "Suspended"),
        (FlowOutcome.PAUSED, states.Scheduled(name="Resuming"), "Resuming"),
        (FlowOutcome.PAUSED, states.Running(), "Resuming"),  # whoever was started by Resume met this process and left
        (FlowOutcome.PAUSED, states.Cancelled(), "Cancelled"),
        (FlowOutcome.TRAINED_ELSEWHERE, states.Running(), "Running"),
        (FlowOutcome.FENCED, states.Running(), "Cancelled"),
        ("live-owner", states.Running(), "Cancelled"),
    ],
)
def test_a_process_sets_the_last_state_only_where_it_is_its_own_to_set(
    client: SyncPrefectClient, flow_run: FlowRun, reason: str, before: State[Any], after: str
) -> None:
    client.set_flow_run_state(flow_run.id, before, force=True)
    _set_last_state(client, flow_run.id, reason, shown_state(FlowEnd(reason=reason, message="why")))
    state = client.read_flow_run(flow_run.id).state
    assert state is not None and state.name == after


def test_a_pause_lasts_until_a_person_resumes_it(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    client.set_flow_run_state(flow_run.id, TIMED, force=True)
    _set_last_state(client, flow_run.id, "paused", shown_state(FlowEnd(reason="paused", message="why")))
    state = client.read_flow_run(flow_run.id).state
    assert state is not None and (state.state_details.pause_timeout, state.state_details.pause_reschedule) == (
        None,
        True,
    )


@pytest.mark.parametrize(
    ("state", "is_end"),
    [(TIMED, True), (states.Paused(), True), (states.Cancelling(), True), (ASKING, False), (states.Running(), False)],
)
def test_a_flow_run_that_asks_for_an_approval_is_not_paused_by_a_person(state: State[Any], is_end: bool) -> None:
    assert _is_end_by_person(state, can_resume=True) == is_end


def test_a_command_whose_flow_run_nobody_can_resume_trains_on_when_that_is_paused() -> None:
    assert not _is_end_by_person(TIMED, can_resume=False)


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
