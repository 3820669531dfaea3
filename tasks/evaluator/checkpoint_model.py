"""Opens a committed checkpoint as a network in evaluation mode, and writes it as a directory for `transformers`.

Source: the layout of `PreTrainedModel.save_pretrained` and `PreTrainedTokenizerFast.save_pretrained`.
"""

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save_file
from torch import Tensor

from cairn.model.architectures import adapters, gpt, hugging_face, own_network
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import LoraConfig, adapter_table
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import StateMismatch
from cairn.model.training.train_state import WEIGHT_PREFIX, load_weights
from cairn.storage.checkpoints.checkpoint import load_checkpoint
from cairn.storage.errors import IntegrityError, restated
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.snapshots.data_snapshot import OpenSnapshot, open_snapshot
from cairn.storage.stores.codec import encode
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.network_module import read_files
from cairn.tasks.data import foreign_tokenizer
from cairn.tasks.errors import TaskError
from cairn.tasks.trainer import initial_weights, tensor_exchange, training_setup


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointModel:
    """A network in evaluation mode with the data snapshot and tokenizer it was trained on."""

    network: own_network.Network
    tokenizer: Tokenizer
    snapshot: OpenSnapshot

    def prompt_ids(self, prompt: str) -> list[int]:
        """Encode a prompt as the text was that the network has learned: of conversations with special tokens in it."""
        return self.tokenizer.encode_prompt(prompt, spelled=bool(self.snapshot.val_answers))


def open_model(
    store: ObjectStore,
    reference: CheckpointReference,
    *,
    model: ModelConfig,
    snapshot_id: str,
    cache_dir: Path,
    device: torch.device,
    mask_documents: bool = False,
    allowed_code: Sequence[str] = (),
) -> CheckpointModel:
    """Load the weights on `device`, with `mask_documents` as in training; raises `IntegrityError` if a byte differs.

    A module is made by its stored files if they are among the `allowed_code`; `InvalidConfiguration` if not.
    """
    network: own_network.Network
    files = read_files(store, model, allowed_code)
    snapshot = open_snapshot(store, snapshot_id, cache_dir)
    if model.module:
        network = own_network.make_network(files, model, snapshot.manifest.vocab_size).to(device)
    else:
        with torch.device("meta"):
            network = gpt.GPT(model, snapshot.manifest.vocab_size)
        network.to_empty(device=device)
    network.boundary_id = snapshot.manifest.end_of_text_id if mask_documents else None
    load_network(network, store, reference)
    tokenizer = foreign_tokenizer.parse_tokenizer(snapshot.tokenizer_json, snapshot.manifest.end_of_text_id)
    return CheckpointModel(network=network.eval(), tokenizer=tokenizer, snapshot=snapshot)


def load_network(network: own_network.Network, store: ObjectStore, reference: CheckpointReference) -> None:
    """Load the verified weights of a checkpoint, adapters added to those they were trained beside; IntegrityError."""
    trained, trainer = read_trained(store, reference)
    if adapters.BASE not in trainer or not isinstance(network, gpt.GPT):
        load_weights(network, {f"{WEIGHT_PREFIX}{name}": tensor for name, tensor in trained.items()})
        return
    with restated(StateMismatch, IntegrityError, reference.prefix):
        sha256, alpha = adapters.named_base(trainer)
        training_setup.load_initial_weights(store, sha256, network)
        adapters.merge(network, trained, alpha)


def read_trained(store: ObjectStore, reference: CheckpointReference) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the verified weights of a checkpoint by their names in the network, and the trainer's small tensors."""
    loaded = load_checkpoint(store, reference, group="weights")
    trained, trainer = map(tensor_exchange.to_tensors, (loaded.tensors, loaded.trainer.tensors))
    return {name.removeprefix(WEIGHT_PREFIX): tensor for name, tensor in trained.items()}, trainer


def write_model_directory(
    folder: Path, opened: CheckpointModel, *, card: str, source: initial_weights.WeightsSource | None = None
) -> None:
    """Write weights, configuration, tokenizer and README by one rename; TaskError unless `folder` is new or empty.

    The documents of the `source` that the weights began with are carried on: special tokens, chat template, ends.
    """
    network, texts = opened.network, _documents(opened, source)
    weights = {name: tensor.detach().cpu().float().numpy() for name, tensor in network.named_parameters()}
    code: Mapping[str, bytes] = {}
    if isinstance(network, own_network.OwnNetwork):
        kept, code = network.module.state_dict(), network.files
        weights |= {name: one.cpu().numpy() for name, one in network.module.named_buffers() if name in kept}
    else:
        weights = hugging_face.to_hugging_face(weights, network.config, network.vocab_size)
    documents = {name: text.encode() for name, text in {**texts, "README.md": card}.items()}
    _write_directory(folder, {**documents, **code}, initial_weights.WEIGHTS, weights)


def write_adapter_directory(
    folder: Path, trained: Mapping[str, Tensor], model: ModelConfig, lora: LoraConfig, *, card: str, base: str
) -> None:
    """Write adapters, by their names in a network, as peft opens them, for the model that it finds as `base`.

    Source: peft, `LoraConfig` and the layout of `PeftModel.save_pretrained`.
    """
    rows = adapter_table(model, lora.targets)
    names = {f"{row.name}.{part}": f"{row.theirs}.lora_{part}" for row in rows for part in "AB"}
    if names.keys() != trained.keys():
        raise IntegrityError("the checkpoint has other adapters than the run's configuration; its log was changed")
    arrays = {f"base_model.model.{theirs}.weight": trained[name].numpy() for name, theirs in names.items()}
    leaves = tuple(dict.fromkeys(row.leaf for row in rows))
    is_whole = len(adapter_table(model, leaves)) == len(rows)  # else the leaf's name would mean more than these
    document: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    document |= {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "bias": "none", "inference_mode": True}
    document["fan_in_fan_out"] = hugging_face.require_family(model) == "gpt2"
    document["target_modules"] = leaves if is_whole else [row.theirs for row in rows]
    texts = {"adapter_config.json": encode(document), "README.md": card.encode()}
    _write_directory(folder, texts, "adapter_model.safetensors", arrays)


def _write_directory(folder: Path, files: Mapping[str, bytes], name: str, arrays: hugging_face.Arrays) -> None:
    require_empty(folder)
    target = folder.resolve()
    staging = target.parent / f".{target.name}-{uuid.uuid4().hex}"
    try:
        staging.mkdir(parents=True)
        for document, content in files.items():
            (staging / document).write_bytes(content)
        save_file(dict(arrays), staging / name, {"format": "pt"})
        staging.rename(target)  # replaces an empty folder, and fails if it was filled meanwhile
    except OSError as error:
        raise TaskError(f"{folder}: cannot be written: {error}; name a folder this user may write to") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _documents(opened: CheckpointModel, source: initial_weights.WeightsSource | None) -> dict[str, str]:
    """Return the texts of an export by name, but for its card."""
    network, end_id = opened.network, opened.tokenizer.end_of_text_id
    carried = {name: source.documents[name] for name in initial_weights.CARRIED if source and name in source.documents}
    end_of_text = foreign_tokenizer.load_library_tokenizer(opened.snapshot.tokenizer_json).id_to_token(end_id)
    documents: dict[str, dict[str, Any]] = {
        "generation_config.json": dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_id),
        "tokenizer_config.json": {
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), end_of_text),
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": network.config.block_size,
            # Without token_type_ids: GPT-2 would add their embeddings to every token's.
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            # As in training: text that spells the end-of-text marker is ordinary text.
            "split_special_tokens": True,
        },
    }
    if carried:  # without a document of its own, the ends of the configuration hold
        del documents["generation_config.json"]
    for name in (name for name in carried if name.endswith(".json")):
        documents[name] = foreign_tokenizer.parse_document(name, carried[name])
    begun_from = carried.get(initial_weights.CONFIG)
    documents[initial_weights.CONFIG] = hugging_face.document_of(
        network.config, ids=network.vocab_size, end_of_text_id=end_id, begun_from=begun_from
    )
    tokenizer = json.loads(opened.snapshot.tokenizer_json)
    around = (tokenizer.get("post_processor") or {}).get("type")
    is_own = source is not None and source.has_tokenizer
    if around not in (None, "ByteLevel") and not is_own:  # training adds no tokens around a text
        documents[initial_weights.TOKENIZER] = tokenizer | {"post_processor": None}
    texts = {**carried, initial_weights.TOKENIZER: opened.snapshot.tokenizer_json}
    return texts | {name: encode(document).decode() for name, document in documents.items()}


def require_empty(folder: Path) -> None:
    """Raise TaskError if `folder` is a file or a folder with content."""
    if folder.exists() and not folder.is_dir():
        raise TaskError(f"{folder}: is no folder; rule: a new or empty folder; name another one")
    if folder.is_dir() and any(folder.iterdir()):
        raise TaskError(f"{folder}: is not empty; rule: nothing is overwritten; name a new folder or empty this one")
