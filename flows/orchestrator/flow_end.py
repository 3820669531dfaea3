"""Ends a flow run in Prefect's own words; why it ended stands first in the message, in a tag and in an event.

Lists and automations of Prefect know only its own state names. A flow that no deployment has begun raises its expected
errors instead, for its caller. Unexpected errors keep their traceback in both.
"""

import functools
import re
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from typing import Any, ParamSpec
from uuid import UUID

from prefect import State, get_client, get_run_logger, runtime, states
from prefect.client.orchestration import SyncPrefectClient
from prefect.events import emit_event
from prefect.exceptions import Abort

from cairn.flows.errors import EXPECTED_ERRORS
from cairn.tasks.policy.termination import FlowEnd, FlowOutcome

P = ParamSpec("P")
FLOW_ENDED = "cairn.flow.ended"
"""The event of a flow run that did not complete; its label `cairn.reason` says why."""
_STATES: Mapping[str, Callable[..., State[Any]]] = {
    FlowOutcome.COMPLETED: states.Completed,
    # What Prefect itself calls a flow run whose machine was taken: orange, not a red failure, and no automation for
    # failures fires, because the next flow run goes on where this one was.
    FlowOutcome.PREEMPTED: states.Crashed,
    FlowOutcome.INTERRUPTED: states.Cancelled,
    FlowOutcome.CANCELLED: states.Cancelled,
    FlowOutcome.FENCED: states.Cancelled,  # another flow run continues it: nothing is lost, nothing is to be done
}


def completed(message: str) -> FlowEnd:
    """Return the end of a flow that has done all it was to do."""
    return FlowEnd(reason=FlowOutcome.COMPLETED, message=message)


def shown_state(end: FlowEnd) -> State[Any]:
    """Return the state, named as Prefect names its own, whose message begins with the reason."""
    message = end.message if end.reason == FlowOutcome.COMPLETED else f"{end.reason}: {end.message}"
    make: Callable[..., State[Any]] = _STATES.get(end.reason, states.Failed)
    return make(message=message)


def reason_of(error: BaseException) -> str:
    """Return the reason of a refusal: `ConfigDrift` is `config-drift`, `IntegrityError` is `integrity`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(error).__name__.removesuffix("Error")).lower()


def as_prefect_state(body: Callable[P, FlowEnd]) -> Callable[P, State[None]]:
    """Turn how the body ended, or its expected error, into the flow run's last state."""

    @functools.wraps(body)
    def wrapper(*arguments: P.args, **keywords: P.kwargs) -> State[None]:
        is_deployed = runtime.deployment.get_id() is not None
        try:
            end = body(*arguments, **keywords)
        except EXPECTED_ERRORS as error:
            if not is_deployed:
                raise
            get_run_logger().error("%s", error)
            end = FlowEnd(reason=reason_of(error), message=str(error))
        state, flow_run_id = shown_state(end), runtime.flow_run.get_id()
        if not state.is_completed() and flow_run_id:
            report_reason(end, flow_run_id, runtime.flow_run.get_name() or "")
            if is_deployed:  # for a returned state the engine would log a long traceback
                with suppress(Exception), get_client(sync_client=True) as client:
                    client.set_flow_run_state(UUID(flow_run_id), state, force=True)
                    raise Abort(state.message)
        return state

    return wrapper


def add_tags(client: SyncPrefectClient, flow_run_id: UUID, tags: Set[str]) -> None:
    """Add the tags that are missing beside those a person has given; Prefect's own update replaces all. Raises."""
    present = set(client.read_flow_run(flow_run_id).tags)
    if not tags <= present:
        client.update_flow_run(flow_run_id, tags=sorted(present | tags))


def report_reason(end: FlowEnd, flow_run_id: str, name: str) -> None:
    """Tag the flow run with the reason and emit the event; an API that fails costs them."""
    with suppress(Exception), get_client(sync_client=True) as client:
        add_tags(client, UUID(flow_run_id), {f"reason:{end.reason}"})
    with suppress(Exception):
        emit_event(
            FLOW_ENDED,
            resource={
                "prefect.resource.id": f"prefect.flow-run.{flow_run_id}",
                "prefect.resource.name": name,
                "cairn.reason": end.reason,
            },
            payload={"reason": end.reason, "message": end.message},
        )
