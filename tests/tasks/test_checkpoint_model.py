"""A model is loaded as it was trained: with its weights, masked at documents where it was, not where it was not."""

from pathlib import Path

import pytest
import torch

from cairn.model.configuration.data import DataConfig
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.training.train_state import TrainState
from cairn.storage.checkpoints.checkpoint import CheckpointTarget, stage_checkpoint
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.evaluator.checkpoint_model import open_model
from cairn.tasks.trainer.tensor_exchange import to_group
from tests.memory_store import MemoryStore
from tests.storage.builders import trainer_document

NETWORKS = {
    "gpt2": ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8),
    "qwen3": ModelConfig(architecture="qwen3", n_layer=1, n_head=2, n_kv_head=1, n_embd=8, block_size=8),
}


@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("model", NETWORKS.values(), ids=NETWORKS)
def test_a_checkpoint_is_opened_with_its_weights_and_the_masking_it_was_trained_with(
    tmp_path: Path, model: ModelConfig, mask_documents: bool
) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {number} of the text" for number in range(60)))
    store, data = MemoryStore(), DataConfig(sources=("a.txt",), tokenizer="bytes")
    snapshot = build_snapshot(store, data, tmp_path)
    state = TrainState.create(
        model,
        TrainingConfig(steps=1, precision="fp32", kernels="stock"),
        snapshot.manifest.vocab_size,
        torch.device("cpu"),
    )
    groups = (to_group("weights", state.named_tensors()),)
    staged = stage_checkpoint(
        store,
        target=CheckpointTarget(run_id="r", attempt=1, prefix="runs/r/checkpoints/c"),
        groups=groups,
        trainer=trainer_document(0),
    )
    opened = open_model(
        store,
        CheckpointReference(step=0, attempt=1, prefix="runs/r/checkpoints/c", manifest_sha256=staged.manifest_sha256),
        model=model,
        snapshot_id=snapshot.snapshot_id,
        cache_dir=tmp_path / "cache",
        device=torch.device("cpu"),
        mask_documents=mask_documents,
    )
    assert opened.network.boundary_id == (snapshot.manifest.end_of_text_id if mask_documents else None)
    weights = opened.network.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in state.model.state_dict().items())
