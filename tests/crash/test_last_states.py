"""The last state of a flow run on a real server where a person paused, resumed or retried it, and who pauses it."""

from typing import Any

import pytest
from prefect import State, states
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun

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
