"""A set of runs: trained one after the other by the command, started by the flow `train-set`, compared by its name."""

import json

import pytest

from cairn.reports.queries.run_status import list_runs
from tests.crash.prefect_api import Prefect, flow_runs
from tests.crash.training_command import RUN, Command
from tests.processes.waiting import patience_seconds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MEMBERS = ["pair.lr=0.001", "pair.lr=0.0003"]
SET = ("--set", "training.lr=1e-3,3e-4", "--set", "training.steps=6")


def train_pair(command: Command) -> int:
    process = command.start_verb("train", "run.toml", "--run-id", "pair", *SET)
    return process.wait(timeout=patience_seconds())


def test_a_set_is_trained_to_its_end_and_trained_again_it_is_done(command: Command) -> None:
    assert (train_pair(command), train_pair(command)) == (0, 0), command.output()
    first = command.output().partition("draw them: cairn compare pair --png pair.png")[0]
    assert first.count("try:") == 0 and all(f"run {name}: " in first for name in MEMBERS), "a line for each of its runs"
    assert "best held-out" in first.rpartition(MEMBERS[1])[0], "and all of them beside each other"
    assert {run.run_id: (run.state, run.attempts) for run in list_runs(command.store)} == {
        name: ("finished", 1) for name in MEMBERS
    }


@pytest.mark.usefixtures("deployed")
def test_the_flow_starts_a_flow_run_of_train_gpt_for_each_value(
    command: Command, api_url: str, prefect: Prefect
) -> None:
    before = {item["id"] for item in flow_runs(api_url, "train-gpt")}
    parameters = {
        "config": str(command.folder / "run.toml"),
        "name": "pair",
        "overrides": ["training.lr=1e-3,3e-4", "training.steps=6"],
        "store": command.store.url,
    }
    prefect("deployment", "run", "train-set/train-set", "--params", json.dumps(parameters))
    prefect("worker", "start", "--pool", "cairn", "--run-once")
    started = [item["parameters"]["run_id"] for item in flow_runs(api_url, "train-gpt") if item["id"] not in before]
    assert sorted(run_id for run_id in started if run_id != RUN) == sorted(MEMBERS)  # other tests train `RUN` meanwhile
