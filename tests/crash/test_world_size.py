"""One model, several processes: another number of them changes no bit, and who is killed is not waited for.

The first rank's death ends the attempt; the others', of replicated ranks, do not.
"""

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from cairn.storage.checkpoints.checkpoint import load_checkpoint
from cairn.storage.logs.step_log import read_step_records
from cairn.tasks.trainer.tensor_exchange import to_tensors
from tests.crash.reference import reference_run
from tests.crash.training_command import Command
from tests.crash.victims import assert_gone, kill, kill_both, kill_flow, trainers_of
from tests.processes.waiting import patience_seconds
from tests.programs.benchmarks.own_process import set_options

STEPS = 24
SHORT = set_options((f"training.steps={STEPS}", "evaluation.every_commits=100", "checkpoint.every_steps=4"))
PLAIN = set_options(("model.dropout=0.0", "training.precision=fp32", "training.kernels=stock"))
PLAIN_DROPOUT = PLAIN[2:]
WIDE = ("--set", "model.n_embd=128")
"""Where bf16 is faster, the default arithmetic of a network this wide is bf16."""
RECOMPUTED = ("--set", "training.activation_checkpointing=true")
SHARED = ("--set", "training.micro_batch=2")
SHARDED = ("--set", "training.parallel=fsdp")
Settings = tuple[str, ...]
of_qwen3 = pytest.mark.parametrize("architecture", ["qwen3"])
"""Half of the tests train the one network, half the other."""


def by(processes: int, *more: str) -> Settings:
    return (*SHORT, "--set", f"training.processes={processes}", *more)


def launchers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "cairn.tasks.trainer.trainer_group" in child.cmdline()]


def ranks_of(process: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    """The trainers below the command by rank; nobody waits for an order any more."""
    return {int(trainer.environ()["RANK"]): trainer for trainer in trainers_of(process)}


def train_and_kill(command: Command, step: int, *settings: str) -> None:
    """Train, and kill all there is once the step is reached."""
    kill_both(command.train_until(step, *settings))


def losses(command: Command) -> dict[int, float]:
    """The loss of every step, where a step was done twice that of the later attempt."""
    records = read_step_records(command.store, "runs/bard", command.state().attempts)
    return {line.step: line.train_loss for line in records}


def world_sizes(command: Command) -> list[int]:
    return [attempt.started.placement.world_size for attempt in command.state().attempts]


def weights(command: Command) -> dict[str, Tensor]:
    """The weights of a finished run."""
    newest = command.state().newest_committed
    assert newest is not None
    return to_tensors(load_checkpoint(command.store, newest.committed.reference, group="weights").tensors)


def greatest_difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """How far any weight is from the other's."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.slow  # quick: test_same_bits_on_any_number_of_processes.py, tests/tasks/trainer/test_rank_resume.py
@of_qwen3
def test_a_run_killed_on_two_processes_and_continued_by_one_ends_with_the_bits_of_one(command: Command) -> None:
    train_and_kill(command, 9, *by(2, *SHARED))
    command.train(*by(1, *SHARED))  # with dropout, in the default arithmetic
    assert world_sizes(command) == [2, 1]
    alone = reference_run(command)
    assert command.state_sha256() == alone.state_sha256
    assert losses(command) == dict(alone.curve)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arithmetic", "architecture"),
    [(PLAIN_DROPOUT, "qwen3"), (WIDE, "qwen3"), (WIDE, "gpt2")],
    ids=["fp32", "default", "default, gpt2"],
)
def test_a_run_moved_from_one_process_to_two_to_four_and_back_ends_with_the_bits_of_one(
    command: Command, arithmetic: Settings
) -> None:
    """The cheaper witness is the test above, and tests/model/test_same_bits_on_any_number_of_processes.py."""
    train_and_kill(command, 5, *by(1, *SHARED, *arithmetic))
    train_and_kill(command, 11, *by(2, *SHARED, *arithmetic))
    train_and_kill(command, 17, *by(4, *SHARED, *arithmetic, *RECOMPUTED))
    command.train(*by(1, *SHARED, *arithmetic, *RECOMPUTED))
    assert world_sizes(command) == [1, 2, 4, 1]
    recomputed = [attempt.started.activation_checkpointing for attempt in command.state().attempts]
    assert recomputed == [False, False, True, True]
    alone = reference_run(command, keeps_activations=True)
    assert command.state_sha256() == alone.state_sha256
    assert losses(command) == dict(alone.curve)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "killed_at", "architecture"),
    [
        pytest.param(by(2), (6, 15), "qwen3", id="two ranks, killed twice"),
        pytest.param(by(3), (10,), "gpt2", id="three ranks, which round alike in the first step after a resume"),
        pytest.param(by(2, *SHARDED), (10,), "qwen3", id="sharded ranks"),
    ],
)
def test_ranks_killed_and_resumed_end_with_the_bits_of_as_many_that_nobody_touched(
    command: Command, tmp_path_factory: pytest.TempPathFactory, settings: Settings, killed_at: tuple[int, ...]
) -> None:
    untouched = Command(tmp_path_factory.mktemp("untouched"), command.api_url, architecture=command.architecture)
    untouched.train(*settings)  # with dropout, in the default arithmetic
    for step in killed_at:
        train_and_kill(command, step, *settings)
    command.train(*settings)
    assert len(command.state().attempts) == len(killed_at) + 1
    assert command.state_sha256() == untouched.state_sha256()


@pytest.mark.slow
def test_a_sharded_run_goes_on_replicated_and_then_alone(
    command: Command, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = Command(tmp_path_factory.mktemp("alone"), command.api_url)
    alone.train(*by(1, *PLAIN))
    train_and_kill(command, 9, *by(2, *PLAIN, *SHARDED))
    train_and_kill(command, 17, *by(2, *PLAIN))
    command.train(*by(1, *PLAIN))
    assert world_sizes(command) == [2, 2, 1]
    assert losses(command) == pytest.approx(losses(alone), rel=1e-5)
    assert greatest_difference(weights(command), weights(alone)) < 1e-5


def first_rank(process: subprocess.Popen[bytes]) -> None:
    kill(ranks_of(process)[0].pid)


def second_rank(process: subprocess.Popen[bytes]) -> None:
    kill(ranks_of(process)[1].pid)


def agent(process: subprocess.Popen[bytes]) -> None:
    (launcher,) = launchers_of(process)
    kill(launcher.pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strike", "settings"),
    [(first_rank, by(2)), (agent, by(2)), (second_rank, by(2, *SHARDED))],
    ids=["the first rank", "the launcher", "any sharded rank"],
)
def test_who_takes_the_others_along_ends_the_attempt_and_the_run_goes_on(
    command: Command, strike: Callable[[subprocess.Popen[bytes]], None], settings: Settings
) -> None:
    process = command.train_until(6, *settings)
    group = [*trainers_of(process), *launchers_of(process)]
    strike(process)
    assert_gone(group)
    assert process.wait(timeout=patience_seconds()) == 0, command.output()
    first, *_ = command.state().attempts
    assert first.ended is not None and (first.ended.reason, first.started.placement.world_size) == ("lost", 2)
    assert "killed by SIGKILL" in first.ended.detail
    assert command.state().finished is not None


@pytest.mark.slow
def test_another_rank_is_killed_and_the_attempt_goes_on_with_the_same_bits(command: Command) -> None:
    process = command.train_until(6, *by(2, *SHARED))
    first, second = (ranks_of(process)[rank] for rank in (0, 1))
    kill(second.pid)
    command.let_go("pause@6")
    assert process.wait(timeout=patience_seconds()) == 0, command.output()
    change, *joined = command.state().member_changes
    assert command.reasons() == ["completed"]
    assert (change.attempt, change.lost, change.remaining, change.charged) == (1, (1,), (0,), "lost")
    assert "rank 1 lost after step 6; 0 go on with the same bits" in command.output()
    records = read_step_records(command.store, "runs/bard", command.state().attempts)
    alone_until = joined[0].step if joined else STEPS + 1
    assert {line.step: line.world_size for line in records} == {
        step: 1 if 7 <= step < alone_until else 2 for step in range(1, STEPS + 1)
    }
    assert not first.is_running()
    alone = reference_run(command)
    assert command.state_sha256() == alone.state_sha256
    assert losses(command) == dict(alone.curve)


@pytest.mark.slow
def test_a_budget_that_is_spent_ends_the_attempt_of_a_lost_rank(command: Command) -> None:
    process = command.train_until(6, *by(2, *SHARED, "--set", "budgets.lost.retries=0"))
    second_rank(process)
    command.let_go("pause@6")
    assert process.wait(timeout=patience_seconds()) not in (0, None)
    (ended,) = command.receipts()
    assert ended.reason == "lost" and not command.state().member_changes
    assert "budget lost is spent: the attempt ends" in command.output()


@pytest.mark.slow
def test_a_rank_that_is_stopped_does_not_outlive_a_flow_that_is_killed(command: Command) -> None:
    process = command.train_until(6, *by(2))
    group = [*trainers_of(process), *launchers_of(process)]
    ranks_of(process)[1].suspend()
    kill_flow(process)
    process.wait()
    assert_gone(group)


def train_with_a_rank_that_hangs(command: Command, *settings: str) -> None:
    """Train to the end, the second rank stopped after step 9 until the watchdog finds it."""
    soon = ("--set", "watchdog.floor_seconds=4", "--set", "watchdog.factor=4")
    process = command.train_until(9, *by(2, *settings, *soon))
    ranks_of(process)[1].suspend()
    command.let_go("pause@9")
    assert process.wait(timeout=patience_seconds()) == 0, command.output()


@pytest.mark.slow
def test_a_rank_that_hangs_is_found_by_the_watchdog_and_is_killed_alone(command: Command) -> None:
    train_with_a_rank_that_hangs(command, *SHARED)
    assert len(command.reasons()) == 1 and command.state().member_changes[0].lost == (1,)
    assert command.state_sha256() == reference_run(command).state_sha256


@pytest.mark.slow
def test_a_sharded_rank_that_hangs_ends_the_attempt(command: Command) -> None:
    train_with_a_rank_that_hangs(command, *SHARDED)
    first, *_ = command.receipts()
    assert first.reason == "hung"
    waiting, stopped = "rank 0:", "rank 1:"
    tail = list(first.stderr_tail)
    of_waiting = tail[tail.index(waiting) : tail.index(stopped)]
    assert any("train_until" in line for line in of_waiting) and any("torch/distributed" in line for line in of_waiting)


@pytest.mark.slow
def test_a_notice_stops_all_ranks_behind_the_same_step_and_what_they_did_is_committed(command: Command) -> None:
    process = command.train_until(6, *by(2))
    process.terminate()
    assert process.wait(timeout=patience_seconds()) == 75, command.output()
    (ended,) = command.receipts()
    assert (ended.reason, ended.last_step) == ("preempted", command.state().resume_step)
    command.train(*by(2))
    assert len(command.state().attempts) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "reason"), [("oom@6", "oom"), ("bad-data@6", "bad-data"), ("kill@6", "lost")])
def test_an_injected_failure_of_two_ranks_has_the_reason_it_has_in_one(
    tmp_path: Path, api_url: str, fault: str, reason: str
) -> None:
    command = Command(tmp_path, api_url, environment={"CAIRN_FAULTS": fault})
    command.train(*by(2))
    first, *_ = command.receipts()
    assert first.reason == reason
