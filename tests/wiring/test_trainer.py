"""What the spec says reaches the network: a trainer in this process, judged by the tensors and records it leaves."""

from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from model.data.token_windows import TokenWindows
from model.errors import LossExploded
from model.inference.evaluation import held_out_loss
from storage.snapshots.data_snapshot import open_snapshot
from tasks.configuration.settings import DivergenceConfig
from tasks.trainer.trainer_protocol import StepDone
from tests.tasks.trainer_in_process import MODEL, TRAINING, TrainingWorld

STEP_TOKENS = TRAINING["global_batch"] * MODEL["block_size"]


def gradient_norm(tensors: dict[str, torch.Tensor], beta: float) -> float:
    """Return the norm of the first step's clipped gradient: what AdamW's first moments hold of it."""
    moments = [tensor for name, tensor in tensors.items() if name.endswith(".exp_avg")]
    return float(torch.cat([tensor.reshape(-1) for tensor in moments]).norm()) / (1 - beta)


def test_attention_stays_within_documents_where_the_run_says_so(world: TrainingWorld) -> None:
    with world.opened(world.spec(training={"mask_documents": True})) as (trainer, parent):
        assert trainer._state.model.boundary_id == world.manifest.end_of_text_id
        trainer.train_segment(1)
    crossing = world.train(world.spec(2), 1)
    assert parent.losses != crossing.parent.losses


@pytest.mark.parametrize("limit", [0.01, 0.02])
def test_a_gradient_is_cut_to_its_greatest_norm(world: TrainingWorld, limit: float) -> None:
    trained = world.train(world.spec(training={"grad_clip": limit}), 1)
    assert trained.parent.records[0].grad_norm > 2 * limit
    assert gradient_norm(dict(trained.tensors), 0.9) == pytest.approx(limit, rel=1e-3)


def test_without_a_limit_the_gradient_is_taken_whole(world: TrainingWorld) -> None:
    trained = world.train(world.spec(training={"grad_clip": 0.0}), 1)
    assert gradient_norm(dict(trained.tensors), 0.9) == pytest.approx(trained.parent.records[0].grad_norm, rel=1e-3)


def test_no_step_draws_a_quarantined_window(world: TrainingWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, gather = set[int](), TokenWindows.gather

    def noting(self: TokenWindows, indexes: Any, into: Any = None) -> Any:
        drawn.update(indexes.tolist())
        return gather(self, indexes, into)

    monkeypatch.setattr(TokenWindows, "gather", noting)
    world.train(world.spec(), 4)
    spoiled = tuple(sorted(drawn))[:5]
    drawn.clear()
    world.train(world.spec(2, quarantined=spoiled), 4)
    assert drawn and not drawn & set(spoiled)


def test_the_probe_measures_held_out_text_and_not_the_train_split(world: TrainingWorld) -> None:
    training = {"probe_every_steps": 2, "probe_batches": 3, "sample_tokens": 5}
    with world.opened(world.spec(training=training, prompt="a")) as (trainer, parent):
        trainer.train_segment(2)
        snapshot = open_snapshot(world.store, world.snapshot_id, world.folder / "cache")
        held_out = TokenWindows(snapshot.val, MODEL["block_size"], snapshot.manifest.vocab_size)
        expected, _ = held_out_loss(trainer._state.model, held_out, batches=3, batch_size=4)
    assert [record.probe_loss for record in parent.records] == [None, expected]


def test_tokens_and_device_time_count_from_the_start_of_the_attempt(world: TrainingWorld) -> None:
    first = world.train(world.spec(), 2)
    again = world.train(world.spec(2, resume=first.staged), 5)
    events = again.parent.all(StepDone)
    assert [event.tokens for event in events] == [STEP_TOKENS, 2 * STEP_TOKENS, 3 * STEP_TOKENS]
    seconds = [event.gpu_seconds for event in events]
    assert seconds == sorted(seconds) and seconds[0] > 0.0


@pytest.mark.parametrize(("patience", "rise"), [(2, 1e-6), (3, 1e-6), (2, 0.01)])
def test_a_diverged_run_blames_exactly_the_windows_of_the_spike(
    world: TrainingWorld, patience: int, rise: float
) -> None:
    rule = DivergenceConfig(patience_steps=patience, rise_nats=rise)
    training = {"steps": 200, "lr": 1e-9, "min_lr": 0.0, "global_batch": 2}
    with world.opened(world.spec(training=training, micro_batch=2, divergence=rule)) as (trainer, parent):
        with pytest.raises(LossExploded) as exploded:
            trainer.train_segment(200)
        order = trainer._data.inputs.order
    error, losses = exploded.value, parent.losses
    last = next(
        step
        for step in range(64 + patience, 201)
        if min(losses[step - patience : step]) > median(losses[step - 64 - patience : step - patience]) + rise
    )
    blamed = np.concatenate([order.windows_of(step) for step in range(last - patience, last)])
    assert (error.step, error.spike_step) == (last, last - patience + 1)
    assert sorted(error.windows) == sorted(blamed.tolist())
