"""Which events start the automations of prefect.yaml and the alert, by Prefect's own matching; no server runs."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import yaml
from prefect.server.utilities.user_templates import render_user_template

from cairn.flows.orchestrator.flow_run import reason_of, shown_state
from cairn.flows.orchestrator.flow_run_tags import FLOW_ENDED
from cairn.flows.orchestrator.server_setup import ALARMING, QUEUES, alert_automation
from cairn.storage.errors import IntegrityError
from cairn.tasks.policy.termination import GIVEN_UP, FlowEnd, FlowOutcome

if TYPE_CHECKING:
    from prefect.server.events.schemas.automations import EventTrigger
    from prefect.server.events.schemas.events import ReceivedEvent

PREFECT_YAML = yaml.safe_load((Path(__file__).parents[2] / "prefect.yaml").read_text(encoding="utf-8"))
DEPLOYMENTS = {item["name"]: item for item in PREFECT_YAML["deployments"]}
NOT_OF_THE_TRIGGER = ("name", "description", "parameters")
CRASHED, HEARTBEAT = "prefect.flow-run.Crashed", "prefect.flow-run.heartbeat"
NEXT = "preempted: SIGTERM; the same command continues; next: flow run 7 of train-gpt/train-gpt"


def trigger(name: str) -> "EventTrigger":
    from prefect.server.events.schemas.automations import EventTrigger

    (found,) = [
        item for item in DEPLOYMENTS["after-crash"]["triggers"] if item["name"] == f"cairn: continue what {name}"
    ]
    return EventTrigger.model_validate({key: value for key, value in found.items() if key not in NOT_OF_THE_TRIGGER})


def event(name: str, *, flow: str = "train-gpt", **labels: str) -> "ReceivedEvent":
    from prefect.server.events.schemas.events import ReceivedEvent

    resource = {"prefect.resource.id": f"prefect.flow-run.{uuid4()}", **labels}
    role = {"prefect.resource.role": "flow", "prefect.resource.name": flow}
    related: Any = [{"prefect.resource.id": f"prefect.flow.{uuid4()}", **role}]
    return ReceivedEvent(occurred=datetime.now(UTC), event=name, resource=resource, related=related, id=uuid4())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message", "flow", "is_looked_after"),
    [
        (CRASHED, "Flow run process exited with non-zero status code -9", "train-gpt", True),
        (CRASHED, NEXT, "train-gpt", False),
        (CRASHED, "preempted: SIGTERM; the same command continues", "train-gpt", True),
        (CRASHED, "Flow run process exited with non-zero status code -9", "sweep-checkpoints", False),
        ("prefect.flow-run.Failed", "budget-exhausted: why", "train-gpt", False),
        ("prefect.flow-run.Cancelled", "cancelled: why", "train-gpt", False),
    ],
)
def test_what_crashed_is_looked_after_unless_its_successor_is_there(
    name: str, message: str, flow: str, is_looked_after: bool
) -> None:
    crashed = event(name, flow=flow, **{"prefect.state-message": message})
    assert trigger("crashed").covers(crashed) == is_looked_after


def test_one_crash_that_is_reported_twice_within_a_minute_is_looked_after_once() -> None:
    crashed = trigger("crashed")
    assert (crashed.within.total_seconds(), crashed.for_each) == (60.0, {"prefect.resource.id"})


def test_a_flow_run_is_silent_that_sends_nothing_after_a_heartbeat_for_three_more() -> None:
    silent = trigger("went silent")
    assert silent.starts_after(HEARTBEAT) and not silent.starts_after(CRASHED)
    assert all(silent.expects(name) for name in (HEARTBEAT, CRASHED, "prefect.flow-run.Suspended"))
    assert silent.within.total_seconds() > 3 * 30


@pytest.mark.parametrize("flow", ["train-gpt", "evaluate-promoted"])
def test_only_training_is_looked_after_when_it_is_silent(flow: str) -> None:
    assert trigger("went silent").covers(event(HEARTBEAT, flow=flow)) == (flow == "train-gpt")


def reasons_of_damage() -> set[str]:
    found, errors = set[str](), [IntegrityError]
    while errors:
        error = errors.pop()
        found.add(reason_of(error.__new__(error)))
        errors += error.__subclasses__()
    return found


def test_the_alert_knows_every_error_of_damaged_data() -> None:
    assert set(ALARMING) == {FlowOutcome.BUDGET_EXHAUSTED, *GIVEN_UP - {"storage"}, *reasons_of_damage()}


@pytest.mark.parametrize("reason", [*FlowOutcome, "integrity", "config-drift"])
def test_the_alert_is_sent_for_what_a_person_must_look_at_and_for_nothing_else(reason: str) -> None:
    from prefect.server.events.schemas.automations import EventTrigger

    alert = EventTrigger.model_validate(alert_automation(uuid4()).trigger.model_dump())
    assert alert.covers(event(FLOW_ENDED, **{"cairn.reason": reason})) == (reason in ALARMING)


def test_the_alert_says_which_run_ended_why_and_what_to_do() -> None:
    why = "budget lost is spent (retries); raise budgets.lost.retries"
    ended = FlowEnd(reason=FlowOutcome.BUDGET_EXHAUSTED, message=why)
    told = {"payload": {"reason": str(ended.reason), "message": ended.message}}
    action: Any = alert_automation(uuid4()).actions[0]
    body = action.body.replace("|ui_url", ".id")  # the address needs a server
    shown = {"flow_run": {"name": "bard, attempt 3", "id": "7"}, "event": told}
    rendered = [asyncio.run(render_user_template(text, shown)) for text in (action.subject, body)]
    assert rendered[0] == "Cairn: bard, attempt 3: budget-exhausted"
    assert "bard, attempt 3 ended: budget-exhausted" in rendered[1] and why in rendered[1]


def test_what_is_short_never_waits_behind_training() -> None:
    queue = {name: item["work_pool"]["work_queue_name"] for name, item in DEPLOYMENTS.items()}
    assert max(QUEUES, key=lambda name: QUEUES[name]) == queue["train-gpt"] == "train"
    assert queue["evaluate-promoted"] == "evaluate" and set(queue.values()) == set(QUEUES)


def test_the_run_list_gets_at_most_a_few_looks_an_hour() -> None:
    (schedule,) = DEPLOYMENTS["watch-runs"]["schedules"]
    assert 3600 / schedule["interval"] <= 4


def test_a_preempted_flow_run_that_names_its_successor_says_so_behind_its_reason() -> None:
    end = FlowEnd(reason=FlowOutcome.PREEMPTED, message=NEXT.removeprefix("preempted: "))
    assert shown_state(end).message == NEXT


def test_a_person_who_deploys_in_a_terminal_is_asked_nothing() -> None:
    assert PREFECT_YAML["pull"] == []
    assert [name for name, item in DEPLOYMENTS.items() if "schedules" not in item] == []
