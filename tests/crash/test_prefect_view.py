"""What people see in Prefect: reasons as state names, what changed in task names, tables, tags; cancelling works."""

import pytest

from tests.crash.prefect_api import ask
from tests.crash.shown_run import ShownRun, flow_run_of
from tests.crash.training_command import Command
from tests.crash.victims import trainers_of
from tests.processes.waiting import patience_seconds

pytestmark = pytest.mark.xdist_group("scarred")  # no other worker waits for that run


@pytest.fixture(scope="module")
def shown(scarred: Command) -> ShownRun:
    """The second flow run of the run that met every fault."""
    return ShownRun(scarred)


def test_a_failed_segment_carries_its_reason_as_state_name(shown: ShownRun) -> None:
    states = shown.task_runs()
    assert states["train-segment 20→25 · attempt 2 (after preempted)"] == "Lost"
    assert states["train-segment 30→35 · attempt 3 (after lost)"] == "BadData"
    assert states["train-segment 40→45 · attempt 5 (after hung)"] == "Completed"
    assert states["train-segment 50→55 · attempt 5 (after hung)"] == "OOM"
    assert (
        states["train-segment 50→55 · attempt 6 (after oom: activations are computed again, bits stay equal)"]
        == "Completed"
    )


def test_the_flow_run_is_tagged_with_its_run_and_every_reason(shown: ShownRun) -> None:
    reasons = ("bad-data", "completed", "hung", "lost", "oom", "preempted")
    assert shown.tags() == [*(f"reason:{reason}" for reason in reasons), "run:bard"]


def test_no_task_carries_a_tag_for_which_prefect_would_make_it_wait(shown: ShownRun) -> None:
    assert shown.task_tags() == []


def test_the_receipts_are_a_table(shown: ShownRun) -> None:
    table = shown.newest_table("cairn-bard-receipts")
    rows = {cells[1]: cells for line in table.splitlines() if (cells := [cell.strip() for cell in line.split("|")])[1:]}
    assert {"preempted", "0 → 12"} <= set(rows["1"])
    assert {"oom", "40 → 52"} <= set(rows["5"])


def test_the_budgets_are_a_table(shown: ShownRun) -> None:
    assert "| oom | 6 | 0 | 1 |" in shown.newest_table("cairn-bard-budgets")


def test_the_curve_is_a_picture_up_to_the_end_of_the_run(shown: ShownRun) -> None:
    markdown = shown.newest_table("cairn-bard-curve")
    assert markdown.startswith("![curves of bard](data:image/png;base64,iVBORw0KGgo")
    assert "step 60 of 60" in markdown and len(markdown) < 200_000


def test_cancelling_stops_the_trainer_and_is_booked_as_cancelled(command: Command, api_url: str) -> None:
    process = command.train_until(3)
    trainers = trainers_of(process)
    cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    ask(api_url, f"flow_runs/{flow_run_of(command)}/set_state", cancelling)
    assert process.wait(timeout=patience_seconds()) == 130
    assert not any(trainer.is_running() for trainer in trainers)
    ended = command.state().attempts[0].ended
    assert ended is not None
    assert (ended.reason, ended.decision.charged) == ("cancelled", None)
