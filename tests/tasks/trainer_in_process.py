"""A trainer without a process of its own: a small store with real text, and the real `Trainer` on a list of events."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save

from cairn.model.configuration.data import DataConfig
from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.training.train_state import TrainState
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.logs.step_log import StepRecord
from cairn.storage.snapshots.snapshot_manifest import SnapshotManifest
from cairn.storage.stores.codec import sha256
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.configuration.settings import DivergenceConfig
from cairn.tasks.data.snapshot_build import build_snapshot
from cairn.tasks.trainer.initial_weights import KEPT, initial_key
from cairn.tasks.trainer.trainer import Trainer
from cairn.tasks.trainer.trainer_channel import Place
from cairn.tasks.trainer.trainer_protocol import Event, StepDone, TrainerSpec
from tests.tasks.corpus_files import shaped

T = TypeVar("T")
LETTERS = {
    f"{name}.jsonl": shaped([name * (20 + number % 13) for number in range(80)], "jsonl").decode() for name in "abc"
}
"""Three sources of one letter each, in documents of different lengths."""
MODEL: Mapping[str, Any] = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 16, "dropout": 0.1}
TRAINING: Mapping[str, Any] = {
    "steps": 8,
    "global_batch": 8,
    "warmup_steps": 2,
    "precision": "fp32",
    "kernels": "fused",
    "device": "cpu",
    "threads": 1,
    "probe_every_steps": 0,
    "sample_tokens": 0,
}


class ParentEnd:
    """The parent's end of a trainer's channel: keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def send(self, event: Event) -> None:
        self.events.append(event)

    def all(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    def last(self, kind: type[T]) -> T:
        return self.all(kind)[-1]

    @property
    def records(self) -> list[StepRecord]:
        return [event.record for event in self.all(StepDone)]

    @property
    def losses(self) -> list[float]:
        return [record.train_loss for record in self.records]


class NeverStopped:
    """The event of a shutdown that nobody requests."""

    def is_set(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a trainer sent and staged, and its state's tensors after the last step."""

    parent: ParentEnd
    staged: StagedCheckpoint
    tensors: Mapping[str, torch.Tensor]


class TrainingWorld:
    """A store with a snapshot of `texts`, and trainers of it in this very process."""

    def __init__(self, folder: Path, *, texts: Mapping[str, str] = LETTERS, **data: Any) -> None:
        for name, text in texts.items():
            (folder / name).write_text(text)
        self.folder, self.store = folder, LocalStore(folder / "store")
        self.data = DataConfig(**{"sources": tuple(texts), "tokenizer": "bytes", **data})
        self.snapshot_id = build_snapshot(self.store, self.data, folder).snapshot_id

    @property
    def manifest(self) -> SnapshotManifest:
        return build_snapshot(self.store, self.data, self.folder).manifest

    def spec(
        self,
        attempt: int = 1,
        *,
        resume: StagedCheckpoint | None = None,
        model: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> TrainerSpec:
        """Return a spec; every attempt is of a run of its own."""
        fields: dict[str, Any] = {
            "micro_batch": 4,
            "activation_checkpointing": False,
            "quarantined": (),
            "divergence": DivergenceConfig(),
            "patience_seconds": 5.0,
            "threads": 1,
            "workers": 1,
            "devices": 1,
            "prompt": "",
            "faults": "",
        }
        return TrainerSpec(
            run_id=f"run-{attempt}",
            attempt=attempt,
            store_url=self.store.url,
            snapshot_id=self.snapshot_id,
            data=self.data,
            model=ModelConfig(**{**MODEL, **(model or {})}),
            training=TrainingConfig(**{**TRAINING, **(training or {})}),
            resume=resume and reference_of(resume),
            cache_dir=self.folder / "cache",
            work_dir=self.folder / "work",
            **{**fields, **changes},
        )

    def keep_weights(self, seed: int = 5, **model: Any) -> str:
        """Store weights that a run begins with, as the opening of a run does, and return their hash."""
        shape, training = ModelConfig(**{**MODEL, **model}), TrainingConfig(**{**TRAINING, "seed": seed})
        drawn = TrainState.create(shape, training, self.manifest.vocab_size, torch.device("cpu")).model
        content = save({name: one.detach() for name, one in drawn.named_parameters()})
        self.store.write(initial_key(name := sha256(content), KEPT), content)
        return name

    @contextmanager
    def opened(self, spec: TrainerSpec) -> Iterator[tuple[Trainer, ParentEnd]]:
        """Yield a trainer with its state restored; what comes after the block is lost with the process."""
        parent, before = ParentEnd(), torch.get_num_threads()
        torch.set_num_threads(spec.threads)
        trainer = Trainer(spec, parent, NeverStopped(), Place(device=torch.device("cpu")))  # type: ignore[arg-type]
        try:
            trainer.resume()
            yield trainer, parent
        finally:
            trainer.finish()
            trainer._reporter._log._file.close()  # what the end of its process does
            torch.set_num_threads(before)

    def train(self, spec: TrainerSpec, until: int) -> Trained:
        """Train up to a step and stage it."""
        with self.opened(spec) as (trainer, parent):
            trainer.train_segment(until)
            trainer._staging.wait()
            tensors = {named.name: named.tensor.clone() for named in trainer._state.live_tensors()}
        return Trained(parent=parent, staged=parent.last(StagedCheckpoint), tensors=tensors)


def reference_of(staged: StagedCheckpoint) -> CheckpointReference:
    return CheckpointReference(
        step=staged.step, attempt=staged.attempt, prefix=staged.prefix, manifest_sha256=staged.manifest_sha256
    )
