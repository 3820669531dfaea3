"""Prefect's graph of a flow run is the chain and nothing else; that of a command's run is in test_prefect_view.py."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import State, Task, flow, states
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from cairn.flows.run.steps import Chain, steps_by
from cairn.tasks.train_segment import Segment
from tests.crash.prefect_api import edges
from tests.crash.shown_run import ended_task_runs
from tests.wiring.flow_in_process import FlowWorld, NotedWarmTrainer, answer_for_evaluators

PROMOTED = "promote step 20 to champion"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlowWorld:
    made = FlowWorld(tmp_path)
    answer_for_evaluators(monkeypatch, made)
    monkeypatch.setattr(random, "random", lambda: 0.5)
    return made


@pytest.fixture
def server(api_url: str) -> Iterator[str]:
    """The session's server, named in this process."""
    with temporary_settings({PREFECT_API_URL: api_url}):
        yield api_url


def trained(world: FlowWorld, *settings: str, fault: str = "none@-1") -> str:
    """Train in a flow run and return its id."""
    ids = list[str]()

    @flow(name="chain", persist_result=False)
    def train() -> None:
        ids.append(str(flow_run.get_id()))
        warm: Any = NotedWarmTrainer("--once", fault)
        world.train("training.micro_batch=4", *settings, warm=warm, steps=steps_by(Chain().as_task))

    train()
    return ids[0]


def test_each_task_run_follows_what_comes_right_before_it_in_the_chain_and_nothing_else(
    world: FlowWorld, server: str
) -> None:
    flow_run_id = trained(world, "checkpoint.every_steps=10", "evaluation.every_commits=1")
    assert edges(ended_task_runs(server, flow_run_id, PROMOTED)) == {
        "tokenize-and-split": [],
        "train-segment 0-10, attempt 1": ["tokenize-and-split"],
        "commit-checkpoint 10, attempt 1": ["train-segment 0-10, attempt 1"],
        "evaluate 10": ["commit-checkpoint 10, attempt 1"],
        "train-segment 10-20, attempt 1": ["train-segment 0-10, attempt 1"],
        "commit-checkpoint 20, attempt 1": ["train-segment 10-20, attempt 1"],
        "evaluate 20": ["commit-checkpoint 20, attempt 1"],
        "promote step 20 to champion": ["evaluate 20"],
    }


def test_a_segment_that_failed_is_followed_by_that_of_the_next_attempt(world: FlowWorld, server: str) -> None:
    flow_run_id = trained(world, "checkpoint.every_steps=10", fault="kill@13")
    follows = edges(ended_task_runs(server, flow_run_id, PROMOTED))
    (again,) = [name for name in follows if name.startswith("train-segment 10-20, attempt 2")]
    assert follows[again] == ["train-segment 10-20, attempt 1"]
    assert follows[PROMOTED] == ["evaluate 20"]


@pytest.mark.parametrize(
    "end", [states.Failed(), states.Cancelled(), states.Crashed(), states.Completed(name="Refused")]
)
def test_however_a_step_has_ended_what_follows_it_is_performed_and_completes(server: str, end: State[Any]) -> None:
    ids, performed = list[str](), list[int]()

    @flow(name="chain", persist_result=False)
    def perform() -> None:
        ids.append(str(flow_run.get_id()))
        chain = Chain()
        before = Task(fn=lambda: end, name="before")(return_state=True).state_details.task_run_id
        assert before is not None
        chain.add(Segment(attempt=1, first=0, until=5), None, before)
        chain.as_task(Task(fn=lambda segment: performed.append(segment.first), name="after"))(
            Segment(attempt=2, first=5, until=10)
        )

    perform()
    found = ended_task_runs(server, ids[0], "after")
    assert (performed, {item["name"]: item["state_name"] for item in found}["after"]) == ([5], "Completed")
    assert edges(found)["after"][0].startswith("before")
