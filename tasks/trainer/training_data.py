"""What an attempt trains on: the snapshot's windows, their order, the batch loader and the probe."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.data.batch_loader import BatchLoader
from model.data.sample_order import SampleOrder
from model.data.token_windows import TokenWindows
from model.data.tokenizer import Tokenizer
from model.training.probe import Probe
from model.training.training_step import StepInputs
from storage.snapshots.data_snapshot import OpenSnapshot, open_snapshot
from storage.snapshots.verified_shard import prefetch_shards
from storage.stores.object_store import ObjectStore
from tasks.data.source_weights import weighted_components
from tasks.trainer.fault_injection import flip_byte
from tasks.trainer.rank_channel import Place
from tasks.trainer.trainer_protocol import TrainerSpec

_DOWNLOADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """The inputs of every step and the probe; `train_files` are the train shards on this disk."""

    inputs: StepInputs
    probe: Probe | None
    vocab_size: int
    end_of_text_id: int
    train_files: tuple[Path, ...]

    def corrupt_next_batch(self, step: int) -> None:
        """Flip a bit on disk in the first sample of step `step` + 1, for fault injection."""
        window = self.inputs.order.windows_of(step)[:1]
        flip_byte(self.train_files, self.inputs.windows.gather(window)[0].astype(np.uint16).tobytes())
        assert self.inputs.loader is not None
        self.inputs.loader.forget()  # it may have read the batch before the flip


def open_training_data(store: ObjectStore, spec: TrainerSpec, place: Place) -> TrainingData:
    """Open the spec's snapshot; its shards are verified ahead, in the background."""
    snapshot = open_snapshot(store, spec.snapshot_id, spec.cache_dir)
    prefetch_shards(snapshot.train, threads=_DOWNLOADS)
    manifest, training = snapshot.manifest, spec.training
    windows = TokenWindows(snapshot.train, spec.model.block_size, manifest.vocab_size)
    order = SampleOrder(
        window_count=windows.window_count,
        seed=training.seed,
        global_batch=training.global_batch,
        quarantined=frozenset(spec.quarantined),
        components=weighted_components(manifest, spec.data, spec.model.block_size),
    )
    rows = place.ranks.rows(training.global_batch)
    return TrainingData(
        inputs=StepInputs(
            windows=windows,
            order=order,
            training=training,
            micro_batch=spec.micro_batch,
            loader=BatchLoader(windows, order, place.device, end_step=training.steps, rows=rows),
        ),
        # A forward through a sharded model needs all ranks; otherwise only rank 0 measures and the others wait.
        probe=_probe(spec, snapshot) if place.ranks.is_first or place.ranks.is_sharded else None,
        vocab_size=manifest.vocab_size,
        end_of_text_id=manifest.end_of_text_id,
        train_files=snapshot.train_files,
    )


def _probe(spec: TrainerSpec, snapshot: OpenSnapshot) -> Probe | None:
    if not spec.training.probe_every_steps:
        return None
    tokenizer = Tokenizer.from_json(snapshot.tokenizer_json)
    return Probe(
        windows=TokenWindows(snapshot.val, spec.model.block_size, snapshot.manifest.vocab_size),
        every_steps=spec.training.probe_every_steps,
        batches=spec.training.probe_batches,
        batch_size=spec.micro_batch,
        sample_tokens=spec.training.sample_tokens,
        prompt_ids=tokenizer.encode_prompt(spec.prompt),
        decode=tokenizer.decode,
    )
