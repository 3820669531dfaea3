"""A run whose checkpoints can write: a real snapshot and real, untrained weights, committed without any training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cairn.model.training.train_state import TrainState
from cairn.storage.checkpoints.checkpoint import (
    TensorGroup,
    checkpoint_target,
    commit_checkpoint,
    stage_checkpoint,
)
from cairn.storage.logs.log_entry import CheckpointReference, this_writer
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.logs.run_log import RunLog
from cairn.storage.snapshots.snapshot_manifest import SnapshotManifest
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.configuration_source import parse_configuration
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.trainer.tensor_exchange import to_group
from tests import entries
from tests.storage.builders import trainer_document

RUN = "bard"


def configuration(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A network whose untrained weights write bytes of every kind, end-of-text among them."""
    source = folder / "text.txt"
    source.write_text("\n\n".join(f"paragraph {number} of the text" for number in range(60)))
    document: dict[str, Any] = {
        "data": {"sources": [str(source)], "tokenizer": "bytes"},
        "model": {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 32},
        "training": {"steps": 40, "global_batch": 2, "device": "cpu", "precision": "fp32", "kernels": "stock"},
    }
    return parse_configuration(document, overrides=overrides, environment={}, name="test")


@dataclass(frozen=True, kw_only=True, slots=True)
class WritingRun:
    """Appends what a trainer's flow would append, one call a fact."""

    log: RunLog
    config: RunConfig
    manifest: SnapshotManifest

    def start(self) -> int:
        """Start the next attempt; returns its number."""
        number = self.log.refresh().latest_attempt + 1
        body = entries.started_with(self.config, number, placement=entries.placement(host="elsewhere"))
        self.log.append(lambda state: body, writer=this_writer())
        return number

    def commit(self, step: int, *, seed: int = 0, scale: float = 1.0) -> CheckpointReference:
        """Commit weights made from `seed`, far apart when `scale` is great."""
        staged = self._staged(step, seed, scale)
        writer = this_writer(attempt=staged.attempt)
        state = commit_checkpoint(self.log, staged, writer=writer, tokens=step, gpu_seconds=1.0)
        return state.checkpoints[-1].committed.reference

    def supersede(self, reference: CheckpointReference) -> None:
        """Let retention pass over a checkpoint."""
        body = entries.superseded(reference, "it is old")
        self.log.append(lambda state: body, writer=this_writer())

    def end(self, reason: str) -> None:
        """End the open attempt."""
        body = entries.ended(self.log.state.latest_attempt, reason)
        self.log.append(lambda state: body, writer=this_writer())

    def finish(self, reference: CheckpointReference) -> None:
        """Say that the last step is committed."""
        body = entries.finished(reference)
        self.log.append(lambda state: body, writer=this_writer(attempt=reference.attempt))

    def _staged(self, step: int, seed: int, scale: float) -> StagedCheckpoint:
        training = self.config.training.model_copy(update={"seed": seed})
        vocab_size = self.manifest.vocab_size
        state = TrainState.create(self.config.model, training, vocab_size, torch.device("cpu"))
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.mul_(scale)
        attempt = self.log.state.latest_attempt
        groups: tuple[TensorGroup, ...] = (to_group("weights", state.named_tensors()),)
        return stage_checkpoint(
            self.log.store,
            target=checkpoint_target(self.log.run_id, step=step, attempt=attempt),
            groups=groups,
            trainer=trainer_document(step),
        )


def open_writing_run(store: ObjectStore, folder: Path, *, overrides: Sequence[str] = (), **opening: Any) -> WritingRun:
    """Build the snapshot and open the run; no attempt is started."""
    config = configuration(folder, overrides)
    snapshot = build_snapshot(store, config.data, folder)
    log = RunLog(store, RUN)
    body = entries.opened_with(config, RUN, snapshot.snapshot_id, **opening)
    log.append(lambda state: body, writer=this_writer())
    return WritingRun(log=log, config=config, manifest=snapshot.manifest)
