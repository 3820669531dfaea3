"""A run with one committed checkpoint of a real, small network, made without a trainer's process."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cairn.model.architectures.adapters import name_base
from cairn.model.training.train_state import TrainState
from cairn.storage.checkpoints.checkpoint import checkpoint_target, commit_checkpoint, stage_checkpoint
from cairn.storage.checkpoints.payload import small_tensor
from cairn.storage.logs.log_entry import CheckpointReference, Writer
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.evaluator.checkpoint_model import CheckpointModel, open_model
from cairn.tasks.trainer.tensor_exchange import to_group, to_record
from cairn.tasks.trainer.training_setup import load_initial_weights
from tests import entries
from tests.storage.builders import trainer_document
from tests.tasks.corpus_files import shaped

TEXTS = [f"Zeile {number} über Ünïcode, 東京 and stones;\n\tthe {number}th cairn." for number in range(200)]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedModel:
    """The run's log, what it was opened with, and its one checkpoint, of step 7 by attempt 1."""

    log: RunLog
    config: RunConfig
    reference: CheckpointReference
    state: TrainState

    @property
    def snapshot_id(self) -> str:
        """The snapshot that the run was opened with."""
        opened = self.log.state.opened
        assert opened is not None
        return opened.data_snapshot

    def open(self, folder: Path, *, mask_documents: bool = False) -> CheckpointModel:
        """Open the checkpoint as every reader does, with a cache in `folder`."""
        return open_model(
            self.log.store,
            self.reference,
            model=self.config.model,
            snapshot_id=self.snapshot_id,
            cache_dir=folder / "cache",
            device=torch.device("cpu"),
            mask_documents=mask_documents,
        )

    def evaluate(self, loss: float) -> None:
        """Record an evaluation of these weights."""
        body = entries.evaluated(
            self.reference.step,
            loss,
            manifest_sha256=self.reference.manifest_sha256,
            suite_sha256="5" * 64,
            data_snapshot="d" * 64,
        )
        self.log.append(lambda state: body, writer=Writer(host="here", pid=1))


def small_configuration(
    *, data: Mapping[str, Any] | None = None, model: Mapping[str, Any] | None = None, **training: Any
) -> RunConfig:
    """A configuration whose text lies in `text.jsonl`."""
    exact = {"precision": "fp32", "kernels": "stock"}
    document = {
        "data": {"sources": ["text.jsonl"], "tokenizer": "bpe:301", "val_fraction": 0.3, **(data or {})},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 16, **(model or {})},
        "training": {"steps": 20, "global_batch": 2, "device": "cpu", "threads": 1, **exact, **training},
    }
    return parse_configuration(document, overrides=(), environment={}, name="test")


def commit_model(
    store: ObjectStore, folder: Path, config: RunConfig, run_id: str = "bard", **opening: Any
) -> CommittedModel:
    """Build the snapshot of `folder`'s text, open a run, and commit a network whose every weight has moved."""
    (folder / "text.jsonl").write_bytes(shaped(TEXTS, "jsonl"))
    snapshot = build_snapshot(store, config.data, folder)
    log, human = RunLog(store, run_id), Writer(host="here", pid=1)
    opened = entries.opened(
        run_id,
        model_family=config.model_family or "gpt2-tiny",
        config=config.frozen(),
        config_sha256=config.frozen_sha256(),
        data_snapshot=snapshot.snapshot_id,
        total_steps=config.training.steps,
        code_version="0.1.0+abc",
        **opening,
    )
    started = entries.started(
        1,
        config=config.document(),
        config_sha256=config.frozen_sha256(),
        code_version="0.1.0+abc",
        micro_batch=2,
    )
    for body in (opened, started):
        log.append(lambda state, body=body: body, writer=human)
    state = TrainState.create(config.model, config.training, snapshot.manifest.vocab_size, torch.device("cpu"))
    if config.training.lora is not None:
        load_initial_weights(store, opening["initial_weights_sha256"], state.model)
        state.beside = name_base(opening["initial_weights_sha256"], config.training.lora)
    document = trainer_document(7)
    beside = tuple(small_tensor(to_record(name, tensor)) for name, tensor in state.beside.items())
    _move(state)
    staged = stage_checkpoint(
        store,
        target=checkpoint_target(run_id, step=7, attempt=1),
        groups=(to_group("weights", state.named_tensors()),),
        trainer=replace(document, tensors=document.tensors + beside),
    )
    after = commit_checkpoint(log, staged, writer=Writer(host="here", pid=1, attempt=1), tokens=224, gpu_seconds=1.5)
    return CommittedModel(log=log, config=config, reference=after.checkpoints[-1].committed.reference, state=state)


@torch.no_grad()
def _move(state: TrainState) -> None:
    generator = torch.Generator().manual_seed(11)
    for parameter in (one for one in state.model.parameters() if one.requires_grad):
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
