"""A trainer whose sources are mixed by weight: the batches it draws, and its bits after a kill."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cairn.model.data.token_windows import TokenWindows
from cairn.tasks.trainer.trainer_protocol import Ready
from tests.tasks.trainer_in_process import Trained, TrainingWorld

WEIGHTS = (5.0, 1.0, 2.0)
STAGES = ({"step": 2, "weights": (0, 1, 3)}, {"step": 5, "weights": (1, 1, 0)})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TrainingWorld:
    return TrainingWorld(tmp_path_factory.mktemp("weighted"), weights=WEIGHTS)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> TrainingWorld:
    return TrainingWorld(tmp_path_factory.mktemp("staged"), weights=WEIGHTS, stages=STAGES)


@pytest.fixture(scope="module")
def undisturbed(staged: TrainingWorld) -> Trained:
    """The run of several stages that nobody touched."""
    return staged.train(staged.spec(90), 8)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What trainers take from the snapshot from now on: the bytes of every window."""
    taken: list[int] = []
    gather = TokenWindows.gather

    def noting(self: TokenWindows, indexes: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        gathered = gather(self, indexes, into)
        taken.extend(int(token) for row in gathered for token in set(row.tolist()) - {256})
        return gathered

    monkeypatch.setattr(TokenWindows, "gather", noting)
    return taken


def test_batches_follow_the_weights_and_mix_no_two_sources_in_a_window(world: TrainingWorld, drawn: list[int]) -> None:
    world.train(world.spec(), 8)
    assert Counter(map(chr, drawn)) == {"a": 40, "b": 8, "c": 16}


def test_batches_follow_the_weights_of_their_stage(staged: TrainingWorld, drawn: list[int]) -> None:
    staged.train(staged.spec(), 8)
    assert Counter(map(chr, drawn)) == {"a": 10 + 12, "b": 2 + 6 + 12, "c": 4 + 18}


@pytest.mark.parametrize(  # quick witness: before, at and after the first stage
    "killed_after", [1, 2, 3, *(pytest.param(step, marks=pytest.mark.slow) for step in (4, 5, 6))]
)
def test_killed_before_at_or_after_a_stage_it_has_the_bits_of_the_run_nobody_touched(
    staged: TrainingWorld, undisturbed: Trained, killed_after: int
) -> None:
    killed = staged.train(staged.spec(10 + killed_after), killed_after).staged
    again = staged.train(staged.spec(20 + killed_after, resume=killed), 8)
    assert again.staged.state_sha256 == undisturbed.staged.state_sha256


@pytest.mark.parametrize("quarantined", [(), (3, 9)])
def test_killed_and_resumed_it_has_the_bits_of_the_run_nobody_touched(
    world: TrainingWorld, quarantined: tuple[int, ...]
) -> None:
    number = 10 * (1 + len(quarantined))
    undisturbed = world.train(world.spec(number, quarantined=quarantined), 8)
    killed = world.train(world.spec(number + 1, quarantined=quarantined), 3).staged
    again = world.train(world.spec(number + 2, resume=killed, quarantined=quarantined), 8)
    ready = again.parent.last(Ready)
    assert (ready.step, ready.state_sha256) == (3, killed.state_sha256)
    assert again.staged.state_sha256 == undisturbed.staged.state_sha256
    assert again.parent.losses == undisturbed.parent.losses[3:]


def test_other_weights_are_another_run(world: TrainingWorld, tmp_path: Path) -> None:
    other = TrainingWorld(tmp_path, weights=(1.0, 1.0, 1.0))
    assert other.snapshot_id == world.snapshot_id
    assert other.train(other.spec(), 2).staged.state_sha256 != world.train(world.spec(2), 2).staged.state_sha256
