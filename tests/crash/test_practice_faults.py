"""The faults of `CAIRN_FAULTS` in one run on real text: with their reasons, charges, and the bits nobody touched."""

from pathlib import Path

import pytest

from storage.logs.run_entries import AttemptEnded
from tests.crash.training_command import Command

pytestmark = pytest.mark.xdist_group("practice-faults")  # its runs are made once for all its tests

EVERY_FAULT = "preempt@12,kill@22,bad-data@31,hang@44,evaluator@2"
RULES = ("--set", "watchdog.floor_seconds=3", "--set", "evaluation.every_commits=2")


def receipts(command: Command) -> list[AttemptEnded]:
    return [attempt.ended for attempt in command.state().attempts if attempt.ended is not None]


def faulty(folder: Path, api_url: str, faults: str) -> Command:
    return Command(folder, api_url, environment={"CAIRN_FAULTS": faults})


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> Command:
    """The run that met every fault which changes neither data nor micro-batch."""
    command = faulty(tmp_path_factory.mktemp("faults"), api_url, EVERY_FAULT)
    command.train(*RULES, exit_code=75)
    command.train(*RULES)
    return command


def test_every_receipt_has_the_right_reason(survivor: Command) -> None:
    assert [ended.reason for ended in receipts(survivor)] == ["preempted", "lost", "bad-data", "hung", "completed"]


def test_every_budget_has_the_right_charge(survivor: Command) -> None:
    charged = [ended.decision.charged for ended in receipts(survivor)]
    assert charged == ["preempted", "lost", "bad-data", "hung", None]


def test_the_weights_are_those_of_the_run_nobody_touched(survivor: Command, undisturbed_sha256: str) -> None:
    assert survivor.state_sha256() == undisturbed_sha256


def test_the_preempted_step_itself_was_committed(survivor: Command) -> None:
    ended = receipts(survivor)[0]
    assert (ended.last_step, survivor.state().attempts[1].started.resumed_from.step) == (12, 12)  # type: ignore[union-attr]


def test_the_flipped_byte_was_made_anew_from_its_source_and_no_sample_was_left_out(survivor: Command) -> None:
    assert "rebuilt from their source" in receipts(survivor)[2].decision.changed
    assert survivor.state().quarantines == ()


def test_the_hang_was_noticed_by_the_runs_own_pace(survivor: Command) -> None:
    assert "no sign of life for" in receipts(survivor)[3].detail


def test_the_evaluator_alone_was_run_again(survivor: Command) -> None:
    state = survivor.state()
    [failed] = state.failed_evaluations
    assert "exited with -9" in failed.detail
    assert any(item.manifest_sha256 == failed.manifest_sha256 for item in state.evaluations)


@pytest.mark.slow
def test_an_oom_halves_the_micro_batch_for_this_and_every_later_attempt(tmp_path: Path, api_url: str) -> None:
    command = faulty(tmp_path, api_url, "oom@8,oom@18,oom@28,kill@38")
    command.train()
    starts = [attempt.started for attempt in command.state().attempts]
    assert [ended.reason for ended in receipts(command)] == ["oom", "oom", "oom", "lost", "completed"]
    assert [started.micro_batch for started in starts] == [4, 2, 1, 1, 1]
    assert [started.activation_checkpointing for started in starts] == [False, False, False, True, True]
    assert [started.changed for started in starts] == [
        "",
        "after oom: micro-batch 4→2",
        "after oom: micro-batch 2→1",
        "after oom: activation checkpointing on",
        "after lost",
    ]


@pytest.mark.slow
def test_a_rate_that_diverges_spends_its_small_budget_and_stops_with_exit_4(tmp_path: Path, api_url: str) -> None:
    command = Command(tmp_path, api_url)
    wild = ("--set", "training.lr=300", "--set", "training.grad_clip=0", "--set", "training.warmup_steps=0")
    command.train(*wild, exit_code=4)
    state, ends = command.state(), receipts(command)
    assert {ended.reason for ended in ends} == {"diverged"}
    assert state.quarantines, "the data of the spike is left out"
    assert ends[-1].decision.action == "stop"
