"""The faults of `CAIRN_FAULTS` in one run on real text: with their reasons, charges, and the right bits at the end."""

from pathlib import Path

import pytest

from cairn.storage.logs.run_log import RunLog
from tests.crash.reference import reference_run
from tests.crash.training_command import ARCHITECTURES, STEPS, Command
from tests.processes.waiting import patience_seconds

pytestmark = pytest.mark.xdist_group("scarred")  # no other worker waits for that run


def faulty(folder: Path, api_url: str, faults: str, architecture: str = "gpt2") -> Command:
    return Command(folder, api_url, environment={"CAIRN_FAULTS": faults}, architecture=architecture)


def test_every_receipt_has_the_right_reason(scarred: Command) -> None:
    assert scarred.reasons() == ["preempted", "lost", "bad-data", "hung", "oom", "completed"]


def test_every_receipt_names_the_fault_that_was_injected_and_only_the_last_has_none(scarred: Command) -> None:
    kinds = [[fault.partition("@")[0] for fault in ended.injected] for ended in scarred.receipts()]
    assert kinds == [["pause", "preempt"], ["kill"], ["bad-data"], ["hang"], ["oom"], []]


def test_every_budget_has_the_right_charge(scarred: Command) -> None:
    charged = [ended.decision.charged for ended in scarred.receipts()]
    assert charged == ["preempted", "lost", "bad-data", "hung", "oom", None]


def test_the_weights_are_those_of_its_steps_trained_in_one_go_with_the_same_sizes(scarred: Command) -> None:
    assert scarred.state_sha256() == reference_run(scarred).state_sha256


def test_the_preempted_step_itself_was_committed(scarred: Command) -> None:
    resumed_from = scarred.state().attempts[1].started.resumed_from
    assert resumed_from is not None and (scarred.receipts()[0].last_step, resumed_from.step) == (12, 12)


def test_the_flipped_byte_was_made_anew_from_its_source_and_no_sample_was_left_out(scarred: Command) -> None:
    assert ".arrow rebuilt from source" in scarred.receipts()[2].decision.changed
    assert scarred.state().quarantines == ()


@pytest.mark.slow  # quick witness: test_the_flipped_byte_was_made_anew_from_its_source_and_no_sample_was_left_out
def test_a_flipped_byte_is_met_by_its_own_run_and_not_by_another_on_the_same_snapshot(
    tmp_path: Path, api_url: str
) -> None:
    command, short = Command(tmp_path, api_url), ("--set", "training.steps=20")
    beside = command.train_until(6, *short)
    written = written_at(tmp_path / "store/data")
    flipped = command.start_verb("train", "run.toml", "--run-id", "flipped", *short, CAIRN_FAULTS="bad-data@8")
    assert flipped.wait(timeout=patience_seconds()) == 0, command.output()
    assert written_at(tmp_path / "store/data") == written
    command.let_go("pause@6")
    assert beside.wait(timeout=patience_seconds()) == 0
    states = [command.state(), RunLog(command.store, "flipped").refresh()]
    assert [[attempt.ended and attempt.ended.reason for attempt in state.attempts] for state in states] == [
        ["completed"],
        ["bad-data", "completed"],
    ]
    assert states[0].finished and states[1].finished
    assert states[0].finished.state_sha256 == states[1].finished.state_sha256


def written_at(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_the_hang_was_noticed_by_the_runs_own_pace(scarred: Command) -> None:
    assert "no sign of life for" in scarred.receipts()[3].detail


def test_the_receipt_of_the_hang_says_where_the_trainer_stood(scarred: Command) -> None:
    tail = scarred.receipts()[3].stderr_tail
    assert tail[0] == "rank 0:" and any("inject_process_fault" in line for line in tail)
    assert any("train_until" in line for line in tail), "the main thread's stack is whole"


def test_after_the_oom_activations_are_computed_again_and_the_micro_batch_stays(scarred: Command) -> None:
    starts = [attempt.started for attempt in scarred.state().attempts]
    assert [started.activation_checkpointing for started in starts] == [False] * 5 + [True]
    assert {started.micro_batch for started in starts} == {4}


def test_the_evaluator_alone_was_run_again(scarred: Command) -> None:
    [failed], [recorded] = scarred.state().failed_evaluations, scarred.state().evaluations
    assert failed.detail == "injected (evaluator@1): the evaluator exited with -9: nothing on stderr"
    assert failed.manifest_sha256 == recorded.manifest_sha256 and recorded.step == STEPS


@pytest.mark.slow  # its quicker witness is tests/model/test_same_bits_on_any_number_of_processes.py
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_oom_leaves_the_bits_of_a_run_that_nobody_touched(
    tmp_path: Path, api_url: str, architecture: str, undisturbed_sha256: str
) -> None:
    command = faulty(tmp_path, api_url, "oom@22", architecture)
    command.train()
    assert command.reasons() == ["oom", "completed"]
    assert command.state_sha256() == undisturbed_sha256


@pytest.mark.slow  # its quicker witness is in tests/tasks/policy/test_budgets.py
def test_further_ooms_halve_the_micro_batch_for_this_and_every_later_attempt(tmp_path: Path, api_url: str) -> None:
    command = faulty(tmp_path, api_url, "oom@8,oom@18,oom@28,kill@38")
    command.train()
    starts = [attempt.started for attempt in command.state().attempts]
    assert command.reasons() == ["oom", "oom", "oom", "lost", "completed"]
    assert [started.micro_batch for started in starts] == [4, 4, 2, 1, 1]
    assert [started.activation_checkpointing for started in starts] == [False, True, True, True, True]
    assert [started.changed for started in starts] == [
        "",
        "after oom: activations are computed again, bits stay equal",
        "after oom: micro-batch 4 to 2, bits differ from here",
        "after oom: micro-batch 2 to 1, bits differ from here",
        "after lost",
    ]


@pytest.mark.slow
def test_a_rate_that_diverges_spends_its_small_budget_and_stops_with_exit_4(tmp_path: Path, api_url: str) -> None:
    command = Command(tmp_path, api_url)
    wild = ("--set", "training.lr=300", "--set", "training.grad_clip=0", "--set", "training.warmup_steps=0")
    command.train(*wild, exit_code=4)
    assert set(command.reasons()) == {"diverged"}
    assert command.state().quarantines, "the data of the spike is left out"
    assert command.receipts()[-1].decision.action == "stop"
