"""A run that stops early: what it says, what it keeps, and the same end however often it is killed."""

from pathlib import Path

import pytest

from tests.crash.training_command import Command
from tests.crash.victims import kill_both

TINY = "\n\n".join(f"{number} stones lie on the hill; the walker counts {number + 1}." for number in range(12))
OVERFIT = (
    "--set=data.sources=['tiny.txt']",
    "--set=data.val_fraction=0.3",
    "--set=model.n_layer=1",
    "--set=model.block_size=16",
    "--set=model.dropout=0.0",
    "--set=training.lr=0.01",
    "--set=training.steps=400",
    "--set=checkpoint.every_steps=20",
    "--set=checkpoint.keep_last=1",
    "--set=evaluation.every_commits=1",
    "--set=early_stop.overfit_ratio=1.5",
    "--set=early_stop.overfit_patience=2",
)


@pytest.fixture
def tiny(command: Command) -> Command:
    """A folder with a text so short that it is learned by heart."""
    _write_text(command.folder)
    return command


def _write_text(folder: Path) -> None:
    (folder / "tiny.txt").write_text(TINY)


@pytest.mark.slow
def test_a_run_that_overfits_stops_says_why_and_ends_with_the_same_bits_through_kills(
    tiny: Command, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tiny.train(*OVERFIT)
    finished = tiny.state().finished
    assert finished is not None and finished.rule == "overfit_ratio" and finished.step < 400, tiny.output()
    assert f"stopped early at step {finished.step}" in tiny.output() and "× train loss" in finished.stopped
    state = tiny.state()
    assert state.newest_committed is not None and state.newest_committed.committed.step == finished.step
    assert tiny.receipts()[-1].decision.action == "finish"
    best = min(state.evaluations, key=lambda item: item.metrics["val_loss"])
    assert best.manifest_sha256 in {record.committed.manifest_sha256 for record in state.readable}
    assert all(item.verdict is not None for item in state.evaluations)

    killed = Command(tmp_path_factory.mktemp("killed"), tiny.api_url)
    _write_text(killed.folder)
    for step in (finished.step // 2, finished.step):
        kill_both(killed.train_until(step, *OVERFIT))
    killed.train(*OVERFIT)
    again = killed.state()
    assert again.finished is not None and len(again.attempts) > 1
    assert (again.finished.step, again.finished.state_sha256) == (finished.step, finished.state_sha256)
    same = {(item.step, item.metrics["val_loss"]) for item in again.evaluations if item.step <= finished.step}
    assert same == {(item.step, item.metrics["val_loss"]) for item in state.evaluations if item.step <= finished.step}
