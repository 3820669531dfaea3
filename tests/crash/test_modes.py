"""In every arithmetic a run can train in, kill -9 leaves the same bits; and which one it is, is decided once."""

from functools import partial
from pathlib import Path

import pytest

from tests.crash.training_command import Command
from tests.crash.victims import kill_both, trained_steps, wait_for

STEPS, KILLED_AT = 24, (3, 13)
SHORT = ("--set", f"training.steps={STEPS}")
BESIDE = (pytest.mark.slow,)


def mode(precision: str, kernels: str) -> tuple[str, ...]:
    return "--set", f"training.precision={precision}", "--set", f"training.kernels={kernels}"


def in_folder(folder: Path, api_url: str) -> Command:
    folder.mkdir()
    return Command(folder, api_url)


def frozen_mode(command: Command) -> tuple[str, str]:
    opened = command.state().opened
    assert opened is not None
    training = opened.config["training"]
    return training["precision"], training["kernels"]


@pytest.mark.parametrize(
    ("precision", "kernels"),
    [
        ("bf16", "fused"),
        pytest.param("bf16", "stock", marks=BESIDE),
        pytest.param("fp32", "fused", marks=BESIDE),
        pytest.param("fp32", "stock", marks=BESIDE),
    ],
)
def test_killed_twice_a_run_ends_in_the_bits_of_one_nobody_touched(
    tmp_path: Path, api_url: str, precision: str, kernels: str
) -> None:
    untouched = in_folder(tmp_path / "untouched", api_url)
    untouched.train(*SHORT, *mode(precision, kernels))
    killed = in_folder(tmp_path / "killed", api_url)
    extra = mode(precision, kernels)
    for step in KILLED_AT:
        process = killed.start(*SHORT, *extra)
        wait_for(partial(_has_trained, killed, step), process, f"step {step}")
        kill_both(process)
        process.wait()
        extra = ()  # the file leaves it to Cairn: what was opened goes on
    killed.train(*SHORT)
    assert killed.state_sha256() == untouched.state_sha256()
    assert frozen_mode(killed) == frozen_mode(untouched) == (precision, kernels)
    assert len(killed.state().attempts) == len(KILLED_AT) + 1


def test_a_run_left_to_cairn_has_its_arithmetic_in_its_log_and_refuses_another(tmp_path: Path, api_url: str) -> None:
    command = in_folder(tmp_path / "default", api_url)
    command.train("--set", "training.steps=5")
    assert "auto" not in frozen_mode(command)
    started = command.state().attempts[-1].started.config["training"]
    assert (started["precision"], started["kernels"]) == frozen_mode(command)
    other = "bf16" if frozen_mode(command)[0] == "fp32" else "fp32"
    command.train("--set", "training.steps=5", "--set", f"training.precision={other}", exit_code=6)
    assert "training.precision" in command.output()


def _has_trained(command: Command, step: int) -> bool:
    return trained_steps(command) >= step
