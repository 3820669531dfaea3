"""What a Prefect server knows of a run's last flow run."""

from typing import Any

from tests.crash.prefect_api import ask, edges, flow_run, task_runs
from tests.crash.training_command import RUN, Command
from tests.processes.waiting import wait_until


def flow_run_of(command: Command) -> str | None:
    """Return the id of the flow run that the run's newest attempt belongs to; None if the server has none yet.

    On a busy server the entries of a short attempt all precede its page, and name none: then it is looked for there.
    """
    if (flow_run_id := command.state().attempts[-1].flow_run_id) is not None:
        return flow_run_id
    wanted = {"flow_runs": {"tags": {"all_": [f"run:{RUN}"]}}, "sort": "EXPECTED_START_TIME_DESC"}
    found = ask(command.api_url, "flow_runs/filter", wanted)
    store = command.store.url.removeprefix("file://")
    return next((str(item["id"]) for item in found if item["parameters"].get("store") == store), None)


def ended_task_runs(api_url: str, flow_run_id: str, last: str) -> list[dict[str, Any]]:
    """Return the task runs, once the server knows the last one: it learns of them by events, later."""

    def has_ended() -> bool:
        return any(item["name"] == last and item["end_time"] for item in task_runs(api_url, flow_run_id))

    wait_until(has_ended, f"the end of {last}")
    return task_runs(api_url, flow_run_id)


class ShownRun:
    """A finished run, and what the server knows of it."""

    def __init__(self, command: Command) -> None:
        flow_run_id = flow_run_of(command)
        assert flow_run_id is not None, "the server has no flow run of this run"
        self.command, self.api_url, self.flow_run_id = command, command.api_url, flow_run_id

    def task_runs(self) -> dict[str, str]:
        """Return the state of each task run by its name."""
        return {item["name"]: item["state_name"] for item in task_runs(self.api_url, self.flow_run_id)}

    def edges(self) -> dict[str, list[str]]:
        """Return the names of the task runs that each one follows, in the order in which they began."""
        return edges(task_runs(self.api_url, self.flow_run_id))

    def task_tags(self) -> list[list[str]]:
        """Return the tags of the task runs that have any."""
        return [item["tags"] for item in task_runs(self.api_url, self.flow_run_id) if item["tags"]]

    def tags(self) -> list[str]:
        """Return the tags of the flow run."""
        return sorted(flow_run(self.api_url, self.flow_run_id)["tags"])

    def name(self) -> str:
        """Return the name of the flow run."""
        return str(flow_run(self.api_url, self.flow_run_id)["name"])

    def artifacts(self) -> list[str]:
        """Return the keys of the flow run's artifacts, one for each card."""
        rule = {"flow_runs": {"id": {"any_": [self.flow_run_id]}}}
        return [item["key"] for item in ask(self.api_url, "artifacts/filter", rule)]

    def newest_table(self, key: str) -> str:
        """Return the newest artifact of this key that belongs to the flow run."""
        filters = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC", "limit": 200}
        tables = ask(self.api_url, "artifacts/filter", filters)
        return str(next(item["data"] for item in tables if item["flow_run_id"] == self.flow_run_id))
