"""A trainer whose sources are mixed by weight: the batches it draws, and its bits after a kill."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from model.configuration.data import DataConfig
from model.configuration.network import ModelConfig
from model.configuration.training import TrainingConfig
from model.data.token_windows import TokenWindows
from storage.checkpoints.checkpoint import StagedCheckpoint
from storage.logs.log_entry import CheckpointReference
from storage.stores.local_store import LocalStore
from tasks.configuration.settings import DivergenceConfig
from tasks.data.snapshot_build import build_snapshot
from tasks.trainer.trainer import Trainer
from tasks.trainer.trainer_channel import Place
from tasks.trainer.trainer_protocol import Event, Ready, StepDone, TrainerSpec

BLOCK = 16
SOURCES = ("a.txt", "b.txt", "c.txt")
TRAINING = TrainingConfig(
    steps=8,
    global_batch=8,
    warmup_steps=2,
    precision="fp32",
    kernels="fused",
    device="cpu",
    threads=1,
    probe_every_steps=0,
    sample_tokens=0,
)


class Heard:
    """The parent's end of the channel."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def send(self, event: Event) -> None:
        self.events.append(event)

    def last(self, kind: type) -> Event:
        return next(event for event in reversed(self.events) if isinstance(event, kind))


class NeverStopped:
    """Nobody asks to stop."""

    def is_set(self) -> bool:
        return False


class Scene:
    """A store with three sources of one letter each, and trainers in this very process."""

    def __init__(self, folder: Path, weights: tuple[float, ...] = (5.0, 1.0, 2.0)) -> None:
        for name in SOURCES:
            text = "\n\n".join(name[0] * (20 + number % 13) for number in range(80))
            (folder / name).write_text(text)
        self.folder, self.store = folder, LocalStore(folder / "store")
        self.data = DataConfig(sources=SOURCES, weights=weights, tokenizer="bytes")
        self.snapshot_id = build_snapshot(self.store, self.data, folder).snapshot_id
        self.batches: list[list[int]] = []

    def train(
        self, attempt: int, until: int, resume: StagedCheckpoint | None = None, quarantined: tuple[int, ...] = ()
    ) -> tuple[Heard, StagedCheckpoint]:
        """Train up to a step and stage it; what comes after the staging is lost with the process."""
        channel = Heard()
        spec = self.spec(attempt, resume, quarantined)
        trainer = Trainer(spec, channel, NeverStopped(), Place(device=torch.device("cpu")))  # type: ignore[arg-type]
        trainer.resume()
        trainer.train_segment(until)
        trainer.finish()
        trainer._reporter._log._file.close()  # what the end of its process does
        staged = channel.last(StagedCheckpoint)
        assert isinstance(staged, StagedCheckpoint)
        return channel, staged

    def spec(self, attempt: int, resume: StagedCheckpoint | None, quarantined: tuple[int, ...]) -> TrainerSpec:
        return TrainerSpec(
            run_id=f"mixed-{attempt}",
            attempt=attempt,
            store_url=self.store.url,
            snapshot_id=self.snapshot_id,
            data=self.data,
            model=ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=BLOCK, dropout=0.1),
            training=TRAINING,
            micro_batch=4,
            activation_checkpointing=False,
            quarantined=quarantined,
            divergence=DivergenceConfig(),
            patience_seconds=5.0,
            threads=1,
            resume=_reference(resume),
            cache_dir=self.folder / "cache",
            work_dir=self.folder / "work",
            prompt="",
            faults="",
        )


def _reference(staged: StagedCheckpoint | None) -> CheckpointReference | None:
    if staged is None:
        return None
    return CheckpointReference(
        step=staged.step, attempt=staged.attempt, prefix=staged.prefix, manifest_sha256=staged.manifest_sha256
    )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


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


def test_batches_follow_the_weights_and_mix_no_two_sources_in_a_window(scene: Scene, drawn: list[int]) -> None:
    scene.train(1, 8)
    assert Counter(map(chr, drawn)) == {"a": 40, "b": 8, "c": 16}


@pytest.mark.parametrize("quarantined", [(), (3, 9)])
def test_killed_and_resumed_it_has_the_bits_of_the_run_nobody_touched(
    scene: Scene, quarantined: tuple[int, ...]
) -> None:
    whole, undisturbed = scene.train(1, 8, quarantined=quarantined)
    _, killed = scene.train(2, 3, quarantined=quarantined)
    channel, again = scene.train(3, 8, killed, quarantined)
    assert (channel.last(Ready), again.state_sha256) == (
        Ready(step=3, state_sha256=killed.state_sha256, parameters=_parameters(channel), device="cpu"),
        undisturbed.state_sha256,
    )
    assert _losses(channel) == _losses(whole)[3:]


def test_other_weights_are_another_run(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Scene(tmp_path / "other", weights=(1.0, 1.0, 1.0))
    assert other.snapshot_id == scene.snapshot_id
    assert other.train(1, 2)[1].state_sha256 != scene.train(1, 2)[1].state_sha256


def _losses(channel: Heard) -> list[float]:
    return [event.record.train_loss for event in channel.events if isinstance(event, StepDone)]


def _parameters(channel: Heard) -> int:
    ready = channel.last(Ready)
    assert isinstance(ready, Ready)
    return ready.parameters
