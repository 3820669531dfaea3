"""Flow runs of a deployment that end before their run does: Prefect's lists show them, and the next goes on as they."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.crash.prefect_api import Prefect, ask, flow_runs, launch, log_of, work
from tests.crash.training_command import Command
from tests.processes.waiting import patience_seconds, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FlowRun = dict[str, Any]
Train = Callable[..., FlowRun]
LISTED = ["Late", "AwaitingRetry", "Running", "Pending", "Completed", "Cancelled", "Crashed", "Failed", "TimedOut"]
"""For these names the deployment page asks."""


@pytest.fixture
def train(command: Command, api_url: str, prefect: Prefect) -> Train:
    """Have a worker run `train-gpt` once, with a fault; returns the flow run as the deployment page gets it."""

    def run(fault: str, *overrides: str) -> FlowRun:
        more = ("--tag", "mine", "--job-variable", 'env={"CAIRN_MARK": "spot"}')
        launch(prefect, command, *more, run_id="bard", overrides=overrides)
        work(prefect, CAIRN_FAULTS=fault)
        flow_run_id = command.state().attempts[-1].flow_run_id
        rule = {"flow_runs": {"id": {"any_": [flow_run_id]}, "state": {"name": {"any_": LISTED}}}}
        (shown,) = ask(api_url, "flow_runs/filter", rule)
        return dict(shown)

    return run


@pytest.fixture
def deployed_openly(deployed: None, prefect: Prefect) -> None:
    """All deployments, on a pool whose template has variables."""
    template = ("--base-job-template", "deployments/job-template-open.json")
    prefect("work-pool", "update", "cairn", *template)


def events(api_url: str, name: str, **labels: str) -> list[FlowRun]:
    """The events of this name whose resource has these labels."""
    rule = {"filter": {"event": {"name": [name]}}, "limit": 50}
    found = ask(api_url, "events/filter", rule)["events"]
    return [item for item in found if labels.items() <= item["resource"].items()]


@pytest.mark.usefixtures("deployed_openly")
def test_a_spent_budget_is_a_failure_in_the_list_with_its_reason_in_message_tag_and_events(
    train: Train, api_url: str
) -> None:
    flow_run = train("kill@3", "budgets.lost.retries=0")
    assert (flow_run["state_name"], flow_run["state_type"]) == ("Failed", "FAILED")
    assert flow_run["state"]["message"].startswith("budget-exhausted: ")
    assert {"mine", "run:bard", "reason:budget-exhausted"} <= set(flow_run["tags"])
    assert "reason:lost" not in flow_run["tags"]
    assert flow_run["name"] == "bard, attempt 1"
    log = log_of(api_url, flow_run["id"])
    assert "attempt 1 ended: lost" in log and "Traceback" not in log and "Finished in state" not in log
    assert log.splitlines()[-1] == flow_run["state"]["message"]
    own = {"prefect.resource.id": f"prefect.flow-run.{flow_run['id']}", "cairn.reason": "budget-exhausted"}
    wait_until(lambda: bool(events(api_url, "cairn.flow.ended", **own)), "the event of the flow run's end")
    related = [
        item
        for item in events(api_url, "cairn.attempt.ended", **{"cairn.reason": "lost"})
        if any(flow_run["id"] in other["prefect.resource.id"] for other in item["related"])
    ]
    (event,) = related
    assert (event["payload"]["run"], event["payload"]["attempt"]) == ("bard", 1)
    assert event["payload"]["decision"]["action"] == "stop"


@pytest.mark.usefixtures("deployed_openly")
def test_a_preempted_flow_run_is_continued_with_the_tags_the_variables_and_the_queue_of_its_launch(
    train: Train, command: Command, api_url: str
) -> None:
    flow_run = train("preempt@12")
    assert (flow_run["state_name"], flow_run["state"]["message"].split(":")[0]) == ("Crashed", "preempted")
    assert "Traceback" not in log_of(api_url, flow_run["id"])
    (successor,) = successors(api_url, command)
    assert f"; next: flow run {successor['id']} of train-gpt/train-gpt" in flow_run["state"]["message"]
    assert successor["name"] == "bard, attempt 2"
    assert {"mine", "run:bard"} <= set(successor["tags"])
    for kept in ("job_variables", "work_queue_name"):
        assert successor[kept] == flow_run[kept]
    assert (successor["job_variables"]["env"], successor["work_queue_name"]) == ({"CAIRN_MARK": "spot"}, "train")


@pytest.mark.usefixtures("deployed_openly")
def test_a_watcher_leaves_a_preempted_flow_run_to_the_successor_it_named(
    train: Train, command: Command, api_url: str
) -> None:
    train("preempt@12")
    look = ("watch", "--once", "--json", "--deployment", "train-gpt/train-gpt")
    assert command.start_verb(*look).wait(timeout=patience_seconds()) == 0
    assert len(successors(api_url, command)) == 1


def successors(api_url: str, command: Command) -> list[FlowRun]:
    """The flow runs that go on with the command's run."""
    wanted = {"run_id": "bard", "store": command.store.url}
    made = [item for item in flow_runs(api_url, "train-gpt") if wanted.items() <= item["parameters"].items()]
    return [item for item in made if str(item["idempotency_key"]).startswith("cairn-watch-")]
