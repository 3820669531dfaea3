"""Opens a committed checkpoint as a network in evaluation mode: verified weights, no optimizer."""

from dataclasses import dataclass
from pathlib import Path

import torch

from model.architectures.gpt import GPT
from model.configuration.network import ModelConfig
from model.data.tokenizer import Tokenizer
from model.training.train_state import load_weights
from storage.checkpoints.checkpoint import load_checkpoint
from storage.logs.log_entry import CheckpointReference
from storage.snapshots.data_snapshot import OpenSnapshot, open_snapshot
from storage.stores.object_store import ObjectStore
from tasks.data.foreign_tokenizer import parse_tokenizer
from tasks.trainer.tensor_exchange import to_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointModel:
    """A network in evaluation mode with the data snapshot and tokenizer it was trained on."""

    network: GPT
    tokenizer: Tokenizer
    snapshot: OpenSnapshot


def open_model(
    store: ObjectStore,
    reference: CheckpointReference,
    *,
    model: ModelConfig,
    snapshot_id: str,
    cache_dir: Path,
    device: torch.device,
    mask_documents: bool = False,
) -> CheckpointModel:
    """Load the weights on `device`, with `mask_documents` as in training; raises `IntegrityError` if a byte differs."""
    snapshot = open_snapshot(store, snapshot_id, cache_dir)
    with torch.device("meta"):
        network = GPT(model, snapshot.manifest.vocab_size)
    network.to_empty(device=device)
    network.boundary_id = snapshot.manifest.end_of_text_id if mask_documents else None
    load_weights(network, to_tensors(load_checkpoint(store, reference, group="weights").tensors))
    return CheckpointModel(
        network=network.eval(), tokenizer=parse_tokenizer(snapshot.tokenizer_json), snapshot=snapshot
    )
