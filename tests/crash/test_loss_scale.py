"""fp16 that is continued: the loss scale goes on where it was, before it grows and after."""

from itertools import pairwise
from pathlib import Path

import pytest

from cairn.storage.logs.step_log import StepRecord, read_step_records, splice
from tests.crash.training_command import RUN, Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
GROWS_AT = 2_000
"""After so many steps without an overflow torch doubles the scale."""
SETTINGS = (
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
    command.train(*(word for one in SETTINGS for word in ("--set", one)), CAIRN_FAULTS=faults)
    attempts = command.state().attempts
    return [point.record for point in splice(read_step_records(command.store, f"runs/{RUN}", attempts), attempts)]


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
