"""A model is loaded as it was trained: with its weights, masked at documents where it was, not where it was not."""

from pathlib import Path

import pytest
import torch

from tests.memory_store import MemoryStore
from tests.tasks.committed_model import commit_model, small_configuration


@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("model", [{}, {"architecture": "qwen3", "n_kv_head": 1}], ids=["gpt2", "qwen3"])
def test_a_checkpoint_is_opened_with_its_weights_and_the_masking_it_was_trained_with(
    tmp_path: Path, model: dict[str, object], mask_documents: bool
) -> None:
    made = commit_model(MemoryStore(), tmp_path, small_configuration(data={"tokenizer": "bytes"}, model=model))
    opened = made.open(tmp_path, mask_documents=mask_documents)
    assert opened.network.boundary_id == (opened.snapshot.manifest.end_of_text_id if mask_documents else None)
    weights = opened.network.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in made.state.model.state_dict().items())
