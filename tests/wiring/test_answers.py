"""The mask that stands in a snapshot reaches the loss of trainer, probe and evaluator."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cairn.model.architectures.gpt import GPT
from cairn.model.data.token_windows import TokenWindows
from cairn.storage.snapshots.data_snapshot import OpenSnapshot, open_snapshot
from cairn.tasks.data.foreign_tokenizer import parse_tokenizer
from cairn.tasks.evaluator.checkpoint_model import CheckpointModel
from cairn.tasks.evaluator.evaluation_run import Suite
from cairn.tasks.evaluator.evaluator import measure_held_out
from tests.tasks.trainer_in_process import MODEL, TRAINING, TrainingWorld

ROWS = [{"prompt": "p" * (9 + n % 23), "completion": f"{n * n}" * (1 + n % 5)} for n in range(200)]


@pytest.fixture
def talks(tmp_path: Path) -> TrainingWorld:
    """A snapshot of conversations, of which a few tokens are answers."""
    text = "\n".join(map(json.dumps, ROWS))
    return TrainingWorld(tmp_path, texts={"talk.jsonl": text}, loss_on="answers")


def opened(world: TrainingWorld) -> OpenSnapshot:
    return open_snapshot(world.store, world.snapshot_id, world.folder / "judge")


def over_answers(network: GPT, tokens: object, masks: object, windows: np.ndarray) -> float:
    """The mean loss over the answers in these windows, by the text's own tokens and masks."""
    ids, counted = (np.concatenate([shard.tokens() for shard in row]) for row in (tokens, masks))  # type: ignore[attr-defined]
    begins = windows[:, None] * MODEL["block_size"] + np.arange(MODEL["block_size"] + 1)
    batch, chosen = torch.from_numpy(ids[begins].astype(np.int64)), torch.from_numpy(counted[begins])[:, 1:]
    with torch.no_grad():
        return float(F.cross_entropy(network(batch[:, :-1])[chosen], batch[:, 1:][chosen]))


def test_a_trainer_s_loss_and_probe_are_over_the_answers(talks: TrainingWorld) -> None:
    training = {"probe_every_steps": 1, "probe_batches": 3, "lr": 1e-30, "min_lr": 0.0}
    with talks.opened(talks.spec(model={"dropout": 0.0}, training=training)) as (trainer, parent):
        network, snapshot = trainer._state.model, opened(talks)
        windows = trainer._data.inputs.order.windows_of(0)
        expected = over_answers(network, snapshot.train, snapshot.train_answers, windows)
        val = TokenWindows(snapshot.val, MODEL["block_size"], snapshot.manifest.vocab_size)
        count = min(3 * TRAINING["global_batch"], val.window_count)
        measured = np.arange(count, dtype=np.int64) * val.window_count // count
        probed = over_answers(network, snapshot.val, snapshot.val_answers, measured)
        trainer.train_segment(1)
    (record,) = parent.records
    assert record.train_loss == pytest.approx(expected, rel=1e-5)
    assert record.probe_loss == pytest.approx(probed, rel=1e-5)


def test_an_evaluation_s_loss_is_over_the_answers_and_in_no_unit_of_bytes(talks: TrainingWorld) -> None:
    snapshot = opened(talks)
    with talks.opened(talks.spec()) as (trainer, _):
        network = trainer._state.model.eval()
        tokenizer = parse_tokenizer(snapshot.tokenizer_json, snapshot.manifest.end_of_text_id)
        suite = Suite(name="own", batches=2, batch_size=8, prompts=(), sample_tokens=0, sample_seed=0)
        model = CheckpointModel(network=network, tokenizer=tokenizer, snapshot=snapshot)
        metrics = measure_held_out(model, suite).metrics
        windows = np.arange(int(metrics["samples"]))
        expected = over_answers(network, snapshot.val, snapshot.val_answers, windows)
    assert metrics["val_loss"] == pytest.approx(expected, rel=1e-5) and "bits_per_byte" not in metrics
    answers, size = snapshot.manifest.answers, snapshot.manifest.splits.val
    assert metrics["share_of_answers"] == answers.val_tokens / size.tokens < 0.5
