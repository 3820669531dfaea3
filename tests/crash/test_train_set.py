"""A set of runs: trained one after the other by the command, started by the flow `train-set`, compared by its name."""

import json
import subprocess

import pytest

from cairn.reports.queries.run_status import list_runs
from cairn.storage.logs.run_log import RunLog
from tests.crash.prefect_api import Prefect, flow_runs, work
from tests.crash.training_command import RUN, Command
from tests.processes.waiting import patience_seconds, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MEMBERS = ["pair.lr=0.001", "pair.lr=0.0003"]
SET = ("--set", "training.lr=1e-3,3e-4", "--set", "training.steps=6")


def train_pair(command: Command) -> int:
    process = command.start_verb("train", "run.toml", "--run-id", "pair", *SET)
    return process.wait(timeout=patience_seconds())


def test_a_set_is_trained_to_its_end_and_trained_again_it_is_done(command: Command) -> None:
    assert (train_pair(command), train_pair(command)) == (0, 0), command.output()
    first, drawn, _ = command.output().partition("2 runs: pair.png (")
    assert drawn and (command.folder / "pair.png").read_bytes().startswith(b"\x89PNG")
    assert first.count("try:") == 0 and all(f"run {name}: " in first for name in MEMBERS), "a line for each of its runs"
    assert "best held-out" in first.rpartition(MEMBERS[1])[0], "and all of them beside each other"
    assert {run.run_id: (run.state, run.attempts) for run in list_runs(command.store)} == {
        name: ("finished", 1) for name in MEMBERS
    }


RATES = ("1e-4", "3e-4", "3e-3", "1e-3")
HALVED = ("--set", "set.halving=2", "--set", "evaluation.every_commits=1", "--set", "training.min_lr=0")
OF_TWENTY = ("--set", "training.steps=20")


def halve(command: Command, name: str) -> "subprocess.Popen[bytes]":
    lr = f"training.lr={','.join(RATES)}"
    return command.start_verb("train", "run.toml", "--run-id", name, "--set", lr, *HALVED, *OF_TWENTY)


def finished_of(command: Command, name: str) -> dict[str, tuple[int, str, str]]:
    """Return step, digest and rule with which each run of a set ended, by its rate."""
    logs = {rate: RunLog(command.store, f"{name}.lr={float(rate)}") for rate in RATES}
    ends = {rate: log.refresh().finished for rate, log in logs.items()}
    assert all(ends.values()), command.output()
    return {rate: (end.step, end.state_sha256, end.rule) for rate, end in ends.items() if end}


def test_a_halved_set_that_is_killed_has_the_same_winner_and_each_run_the_bits_that_it_has_alone(
    command: Command,
) -> None:
    assert halve(command, "calm").wait(timeout=patience_seconds()) == 0, command.output()
    expected = finished_of(command, "calm")
    assert sorted((step, rule) for step, _, rule in expected.values()) == [
        *((5, "set.halving"), (5, "set.halving"), (10, "set.halving"), (20, ""))
    ]
    killed, second = halve(command, "torn"), RunLog(command.store, f"torn.lr={float(RATES[1])}")
    wait_for(lambda: second.refresh().commits > 0, killed, "a commit of the second run", command.output)
    killed.kill()
    killed.wait()
    assert halve(command, "torn").wait(timeout=patience_seconds()) == 0, command.output()
    assert finished_of(command, "torn") == expected
    (winner,) = (rate for rate, (_, _, rule) in expected.items() if not rule)
    alone = (*HALVED, *OF_TWENTY, "--set", f"training.lr={winner}")
    assert command.start(*alone).wait(timeout=patience_seconds()) == 0, command.output()
    assert command.state_sha256() == expected[winner][1]


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
    work(prefect)
    started = [item["parameters"]["run_id"] for item in flow_runs(api_url, "train-gpt") if item["id"] not in before]
    assert sorted(run_id for run_id in started if run_id != RUN) == sorted(MEMBERS)  # other tests train `RUN` meanwhile
