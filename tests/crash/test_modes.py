"""In every arithmetic a run can train in, kill -9 leaves the same bits; and which one it is, is decided once."""

from itertools import pairwise
from pathlib import Path

import pytest

from cairn.storage.logs.step_log import StepRecord, read_step_records, splice
from tests.crash.reference import reference_run
from tests.crash.training_command import RUN, Command
from tests.crash.victims import kill_both

STEPS, KILLED_AT = 24, (3, 13)
SHORT = ("--set", f"training.steps={STEPS}")


def mode(precision: str, kernels: str) -> tuple[str, ...]:
    return "--set", f"training.precision={precision}", "--set", f"training.kernels={kernels}"


def frozen_mode(command: Command) -> tuple[str, str]:
    opened = command.state().opened
    assert opened is not None
    training = opened.config["training"]
    return training["precision"], training["kernels"]


NETWORKS = {
    "gpt2": (),
    "qwen3 moved by muon": ("--set", "model.architecture=qwen3", "--set", "training.optimizer=muon"),
}


@pytest.mark.slow  # quick witnesses: tests/model/kernels/test_fused_block.py and tests/crash/test_kill_anywhere.py
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("kernels", ["fused", "stock"])
def test_killed_twice_a_run_ends_in_the_bits_of_its_steps_trained_in_one_go(
    command: Command, network: tuple[str, ...], precision: str, kernels: str
) -> None:
    extra = mode(precision, kernels)
    for step in KILLED_AT:
        kill_both(command.train_until(step, *SHORT, *network, *extra))
        extra = ()  # the file leaves it to Cairn: what was opened goes on
    command.train(*SHORT, *network)
    assert command.state_sha256() == reference_run(command).state_sha256
    assert frozen_mode(command) == (precision, kernels)
    assert len(command.state().attempts) == len(KILLED_AT) + 1


@pytest.mark.slow  # quick witness: tests/flows/preparation/test_training_request.py
def test_a_run_left_to_cairn_has_its_arithmetic_in_its_log_and_refuses_another(command: Command) -> None:
    command.train("--set", "training.steps=5")
    assert "auto" not in frozen_mode(command)
    started = command.state().attempts[-1].started.config["training"]
    assert (started["precision"], started["kernels"]) == frozen_mode(command)
    other = "bf16" if frozen_mode(command)[0] == "fp32" else "fp32"
    command.train("--set", "training.steps=5", "--set", f"training.precision={other}", exit_code=6)
    assert "training.precision" in command.output()


GROWS_AT = 2_000
"""After so many steps without an overflow torch doubles the scale."""
GROWING = (
    f"training.steps={GROWS_AT + 60}",
    "training.precision=fp16",
    "training.kernels=stock",
    "training.global_batch=2",
    "training.micro_batch=2",
    "training.probe_every_steps=0",
    "checkpoint.every_steps=1020",
    "evaluation.every_commits=2",
)


def train(command: Command, faults: str) -> list[StepRecord]:
    """Train with these faults; return the surviving steps."""
    command.train(*(word for one in GROWING for word in ("--set", one)), CAIRN_FAULTS=faults)
    attempts = command.state().attempts
    return [point.record for point in splice(read_step_records(command.store, f"runs/{RUN}", attempts), attempts)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fp16_that_is_killed_before_and_after_its_scale_has_changed_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, api_url: str
) -> None:
    folders = [tmp_path / "undisturbed", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    undisturbed, killed = (Command(folder, api_url) for folder in folders)
    records = train(undisturbed, "")
    changed = [later.step for earlier, later in pairwise(records) if earlier.loss_scale != later.loss_scale]
    assert changed, "the scale grows, and an overflow may halve it again"
    again = train(killed, f"kill@{GROWS_AT - 10},kill@{GROWS_AT + 50}")
    assert [item.started.first_step for item in killed.state().attempts] == [0, 1020, 2040]
    assert [record.loss_scale for record in again] == [record.loss_scale for record in records]
    assert killed.state_sha256() == undisturbed.state_sha256()
