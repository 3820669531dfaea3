"""Opens a committed checkpoint as a network in evaluation mode, and writes it as a directory for `transformers`.

Source: the layout of `PreTrainedModel.save_pretrained` and `PreTrainedTokenizerFast.save_pretrained`.
"""

import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save_file

from cairn.model.architectures import gpt, hugging_face
from cairn.model.configuration.network import ModelConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.training.train_state import load_weights
from cairn.storage.checkpoints.checkpoint import load_checkpoint
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.snapshots.data_snapshot import OpenSnapshot, open_snapshot
from cairn.storage.stores.codec import encode
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.data.foreign_tokenizer import load_library_tokenizer, parse_tokenizer
from cairn.tasks.errors import TaskError
from cairn.tasks.trainer import initial_weights, tensor_exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointModel:
    """A network in evaluation mode with the data snapshot and tokenizer it was trained on."""

    network: gpt.GPT
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
        network = gpt.GPT(model, snapshot.manifest.vocab_size)
    network.to_empty(device=device)
    network.boundary_id = snapshot.manifest.end_of_text_id if mask_documents else None
    load_weights(network, tensor_exchange.to_tensors(load_checkpoint(store, reference, group="weights").tensors))
    tokenizer = parse_tokenizer(snapshot.tokenizer_json, snapshot.manifest.end_of_text_id)
    return CheckpointModel(network=network.eval(), tokenizer=tokenizer, snapshot=snapshot)


def write_model_directory(folder: Path, opened: CheckpointModel, *, card: str) -> None:
    """Write weights, configuration, tokenizer and README by one rename; TaskError unless `folder` is new or empty."""
    require_empty(folder)
    network, end_id = opened.network, opened.tokenizer.end_of_text_id
    config = hugging_face.config_of(network.config, vocab_size=network.vocab_size, end_of_text_id=end_id)
    end_of_text = load_library_tokenizer(opened.snapshot.tokenizer_json).id_to_token(end_id)
    documents: dict[str, dict[str, Any]] = {
        initial_weights.CONFIG: config.model_dump(mode="json", exclude_none=True),
        "generation_config.json": {"bos_token_id": end_id, "eos_token_id": end_id, "pad_token_id": end_id},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end_of_text,
            "eos_token": end_of_text,
            "unk_token": end_of_text,
            "model_max_length": network.config.block_size,
            # Without token_type_ids: GPT-2 would add their embeddings to every token's.
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            # As in training: text that spells the end-of-text marker is ordinary text.
            "split_special_tokens": True,
        },
    }
    target = folder.resolve()
    staging = target.parent / f".{target.name}-{uuid.uuid4().hex}"
    try:
        staging.mkdir(parents=True)
        for name, content in documents.items():
            (staging / name).write_bytes(encode(content))
        tokenizer = opened.snapshot.tokenizer_json
        document = json.loads(tokenizer)
        if (document.get("post_processor") or {}).get("type") not in (None, "ByteLevel"):
            tokenizer = encode(document | {"post_processor": None}).decode()  # training adds no tokens around a text
        (staging / initial_weights.TOKENIZER).write_text(tokenizer, encoding="utf-8")
        (staging / "README.md").write_text(card, encoding="utf-8")
        weights = {name: tensor.detach().cpu().float().numpy() for name, tensor in network.named_parameters()}
        renamed = hugging_face.to_hugging_face(weights, network.config, network.vocab_size)
        save_file(renamed, staging / initial_weights.WEIGHTS, {"format": "pt"})
        staging.rename(target)  # replaces an empty folder, and fails if it was filled meanwhile
    except OSError as error:
        raise TaskError(f"{folder}: cannot be written: {error}; name a folder this user may write to") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def require_empty(folder: Path) -> None:
    """Raise TaskError if `folder` is a file or a folder with content."""
    if folder.exists() and not folder.is_dir():
        raise TaskError(f"{folder}: is no folder; rule: a new or empty folder; name another one")
    if folder.is_dir() and any(folder.iterdir()):
        raise TaskError(f"{folder}: is not empty; rule: nothing is overwritten; name a new folder or empty this one")
