"""Evaluations that take longer than training, on an ordinary disk: what they leave is freed one by one, and said.

The quick witness is tests/wiring/test_slow_evaluator.py.
"""

import re
import time

import pytest

from cairn.storage.logs.run_state import RunState
from tests.crash.training_command import Command
from tests.processes.waiting import patience_seconds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 12
SUITE = """
[[evaluation.evaluators]]
name = "slow"
command = ["sh", "-c", "sleep 1; echo '{\\"score\\": 1}'"]
"""
SETTINGS = (
    f"training.steps={STEPS}",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=1",
    "checkpoint.keep_best=0",
    "evaluation.every_commits=1",
)
FEW = 4
"""The newest, the one before it while a sweep is under way, and what was evaluated or committed meanwhile."""


def kept_for_nothing(state: RunState) -> int:
    """Return how many checkpoints have their bytes although every evaluation of theirs is there."""
    suites = {item.suite_sha256 for item in state.evaluations}
    live = (record for record in state.live_checkpoints if len(record.evaluations) >= max(2, len(suites)))
    return sum(1 for _ in live)


def test_no_more_than_a_few_checkpoints_wait_for_a_sweep_and_each_evaluation_after_training_has_its_line(
    command: Command,
) -> None:
    with (command.folder / "run.toml").open("a", encoding="utf-8") as file:
        file.write(SUITE)
    process, most = command.start(*(word for one in SETTINGS for word in ("--set", one))), 0
    deadline = time.monotonic() + patience_seconds()
    while process.poll() is None and time.monotonic() < deadline:
        most = max(most, kept_for_nothing(command.state()))
        time.sleep(0.2)
    assert process.wait(timeout=patience_seconds()) == 0, command.output()
    assert most <= FEW
    state, output = command.state(), command.output()
    assert len(state.evaluations) == 2 * STEPS and len(state.live_checkpoints) <= FEW
    outstanding = re.search(r"(\d+) evaluations? outstanding\n", output)
    assert outstanding, output
    after = output[outstanding.end() :]
    assert len(re.findall(r"evaluated step \d+, \d+ evaluations? outstanding", after)) >= int(outstanding[1]) - 1
