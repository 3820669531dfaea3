"""What people see in Prefect: reasons of segments, what changed, one page, tags; cancelling works."""

import pytest

from tests.crash.prefect_api import ask
from tests.crash.shown_run import ShownRun, ended_task_runs, flow_run_of
from tests.crash.training_command import Command
from tests.crash.victims import trainers_of
from tests.processes.waiting import patience_seconds, wait_for

pytestmark = pytest.mark.xdist_group("scarred")  # no other worker waits for that run
PROMOTED = "promote step 60 to champion"


@pytest.fixture(scope="module")
def shown(scarred: Command) -> ShownRun:
    """The second flow run of the run that met every fault, once the server knows its last task run."""
    run = ShownRun(scarred)
    ended_task_runs(scarred.api_url, run.flow_run_id, PROMOTED)
    return run


def test_a_failed_segment_carries_its_reason_as_state_name(shown: ShownRun) -> None:
    ends = {
        "attempt 2 (after preempted": "Lost",
        "attempt 3 (after lost": "BadData",
        "attempt 4 (after bad-data: damaged train-": "Hung",
        "attempt 5 (after hung": "OOM",
        "attempt 6 (after oom: activations are computed again": "Completed",
    }
    segments = [item for item in shown.task_runs().items() if item[0].startswith("train-segment ")]
    for attempt, reason in ends.items():
        states = {state for name, state in segments if attempt in name}
        assert reason in states and states <= {reason, "Completed"}, attempt


def test_a_commit_follows_its_segment_an_evaluation_its_commit_and_a_segment_the_one_before(shown: ShownRun) -> None:
    edges = shown.edges()
    commits = {name.split()[1].strip(","): name for name in edges if name.startswith("commit-checkpoint ")}
    for step, name in commits.items():
        (segment,) = edges[name]
        assert f"-{step}, {name.partition(', ')[2]}" in segment
    assert edges["evaluate 60"] == [commits["60"]] and edges[PROMOTED] == ["evaluate 60"]
    _, *later = [name for name in edges if name.startswith("train-segment ")]
    assert [name for name in later if not edges[name][0].startswith("train-segment ")] == []


def test_the_flow_run_is_tagged_with_its_run_and_the_reason_of_its_own_end_alone(shown: ShownRun) -> None:
    assert shown.tags() == ["reason:completed", "run:bard"]


def test_no_task_carries_a_tag_for_which_prefect_would_make_it_wait(shown: ShownRun) -> None:
    assert shown.task_tags() == []


def test_the_flow_run_is_named_after_its_run_and_newest_attempt(shown: ShownRun) -> None:
    assert shown.name() == "bard, attempt 6"


def test_one_page_shows_the_run_however_often_it_changed(shown: ShownRun) -> None:
    assert shown.artifacts() == ["cairn-bard"]


def test_the_page_has_receipts_budgets_and_the_other_flow_run(shown: ShownRun) -> None:
    page = shown.newest_table("cairn-bard")
    rows = {cells[1]: cells for line in page.splitlines() if (cells := [cell.strip() for cell in line.split("|")])[1:]}
    assert {"preempted", "0 → 12"} <= set(rows["1"])
    assert {"oom", "40 → 52"} <= set(rows["5"])
    assert "| oom | 6 | 0 | 1 |" in page
    first = shown.command.state().attempts[0].flow_run_id
    assert f"- [attempt 1](../../runs/flow-run/{first})" in page


def test_the_page_has_the_curve_as_a_picture_up_to_the_end_of_the_run(shown: ShownRun) -> None:
    page = shown.newest_table("cairn-bard")
    assert "![curves of bard](data:image/png;base64,iVBORw0KGgo" in page and len(page) > 10_000
    assert "step 60 of 60" in page and "**finished at 60/60** · " in page


def test_cancelling_stops_the_trainer_and_is_booked_as_cancelled(command: Command, api_url: str) -> None:
    process = command.train_until(7)
    wait_for(lambda: flow_run_of(command) is not None, process, "the flow run", command.output)
    trainers = trainers_of(process)
    cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    ask(api_url, f"flow_runs/{flow_run_of(command)}/set_state", cancelling)
    assert process.wait(timeout=patience_seconds()) == 130
    assert not any(trainer.is_running() for trainer in trainers)
    ended = command.receipts()[0]
    assert (ended.reason, ended.decision.charged) == ("cancelled", None)
