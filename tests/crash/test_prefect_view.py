"""What people see in Prefect: reasons as state names, what changed in task names, tables, tags; cancelling works."""

import time
from functools import partial

import pytest

from tests.crash.prefect_api import ask
from tests.crash.training_command import Command
from tests.crash.victims import trained_steps, trainers_of, wait_for

pytestmark = pytest.mark.xdist_group("prefect-view")  # its runs are made once for all its tests


def flow_run_of(command: Command) -> str:
    flow_run_id = command.state().attempts[-1].started.flow_run_id
    assert flow_run_id is not None
    return flow_run_id


class Shown:
    """A run with an OOM and a kill, and what the server knows of it."""

    def __init__(self, command: Command, api_url: str) -> None:
        self.command, self.api_url, self.flow_run_id = command, api_url, flow_run_of(command)

    def task_runs(self) -> dict[str, str]:
        filters = {"flow_runs": {"id": {"any_": [self.flow_run_id]}}, "limit": 200}
        return {item["name"]: item["state_name"] for item in ask(self.api_url, "task_runs/filter", filters)}

    def tags(self) -> list[str]:
        return sorted(
            ask(self.api_url, "flow_runs/filter", {"flow_runs": {"id": {"any_": [self.flow_run_id]}}})[0]["tags"]
        )

    def newest_table(self, key: str) -> str:
        filters = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC", "limit": 200}
        tables = ask(self.api_url, "artifacts/filter", filters)
        return next(item["data"] for item in tables if item["flow_run_id"] == self.flow_run_id)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> Shown:
    """The run, once for all claims."""
    command = Command(tmp_path_factory.mktemp("shown"), api_url, environment={"CAIRN_FAULTS": "oom@8,kill@18"})
    command.train()
    return Shown(command, api_url)


def test_a_failed_segment_carries_its_reason_as_state_name(shown: Shown) -> None:
    states = shown.task_runs()
    assert states["train-segment 5→10 · attempt 1"] == "OOM"
    assert states["train-segment 15→20 · attempt 2 (after oom: micro-batch 4→2)"] == "Lost"
    assert states["train-segment 15→20 · attempt 3 (after lost)"] == "Completed"


def test_the_flow_run_is_tagged_with_its_run_and_every_reason(shown: Shown) -> None:
    assert shown.tags() == ["reason:completed", "reason:lost", "reason:oom", "run:bard"]


def test_no_task_carries_a_tag_for_which_prefect_would_make_it_wait(shown: Shown) -> None:
    filters = {"flow_runs": {"id": {"any_": [shown.flow_run_id]}}, "limit": 200}
    assert [item["tags"] for item in ask(shown.api_url, "task_runs/filter", filters) if item["tags"]] == []


def test_the_receipts_are_a_table(shown: Shown) -> None:
    table = shown.newest_table("cairn-bard-receipts")
    rows = {cells[1]: cells for line in table.splitlines() if (cells := [cell.strip() for cell in line.split("|")])[1:]}
    assert {"oom", "0 → 8"} <= set(rows["1"])
    assert {"lost", "5 → 18"} <= set(rows["2"])


def test_the_budgets_are_a_table(shown: Shown) -> None:
    assert "| oom | 6 | 0 | 1 |" in shown.newest_table("cairn-bard-budgets")


def test_the_curve_is_a_picture_up_to_the_end_of_the_run(shown: Shown) -> None:
    markdown = shown.newest_table("cairn-bard-curve")
    assert markdown.startswith("![curves of bard](data:image/png;base64,iVBORw0KGgo")
    assert "step 60 of 60" in markdown and len(markdown) < 200_000


def test_cancelling_stops_the_trainer_within_seconds_and_is_booked_as_cancelled(command: Command, api_url: str) -> None:
    process = command.start("--set", "training.steps=100000")
    wait_for(partial(_has_trained, command, 3), process, "step 3")
    trainers = trainers_of(process)
    cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    asked = time.monotonic()
    ask(api_url, f"flow_runs/{flow_run_of(command)}/set_state", cancelling)
    assert process.wait(timeout=60) == 130
    assert time.monotonic() - asked < 30
    assert not any(trainer.is_running() for trainer in trainers)
    ended = command.state().attempts[0].ended
    assert ended is not None
    assert (ended.reason, ended.decision.charged) == ("cancelled", None)


def _has_trained(command: Command, step: int) -> bool:
    return trained_steps(command) >= step
