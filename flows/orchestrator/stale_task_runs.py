"""Ends the task runs and flow runs that killed processes have left as Running in Prefect."""

from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.states import Crashed

from storage.logs.run_state import RunState
from tasks.policy.termination import TerminationReason

MOST_FLOW_RUNS = 20
_AT_WORK = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
_SHOWN = 200


def lost_flow_runs(state: RunState, but: UUID) -> tuple[UUID, ...]:
    """Return the flow runs, newest first, whose newest attempt was lost: they are dead or fenced."""
    newest = {a.started.flow_run_id: a.ended for a in state.attempts if a.started.flow_run_id}
    lost = [UUID(name) for name, end in newest.items() if end is not None and end.reason == TerminationReason.LOST]
    return tuple(flow_run_id for flow_run_id in reversed(lost) if flow_run_id != but)[:MOST_FLOW_RUNS]


def close_lost(client: SyncPrefectClient, state: RunState, flow_run_id: UUID) -> None:
    """End the unfinished runs of lost attempts as `Crashed`; raises the API's errors."""
    lost = list(lost_flow_runs(state, flow_run_id))
    if not lost:
        return
    ending: State[Any] = Crashed(
        name="Lost", message=f"its process is gone; flow run {flow_run_id} went on in its place"
    )
    at_work = TaskRunFilterState(type=TaskRunFilterStateType(any_=_AT_WORK))
    rule = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=lost), state=at_work)
    for task_run in client.read_task_runs(task_run_filter=rule, limit=_SHOWN):
        client.set_task_run_state(task_run.id, ending, force=True)
    unfinished = FlowRunFilterState(type=FlowRunFilterStateType(any_=_AT_WORK))
    for flow_run in client.read_flow_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=lost), state=unfinished)
    ):
        client.set_flow_run_state(flow_run.id, ending, force=True)
