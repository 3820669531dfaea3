"""What an attempt trains on: the snapshot's windows, their order, and the probe on held-out text.

Owns how an order becomes these. Refuses to know the train state.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from model.data.sample_order import SampleOrder
from model.data.token_windows import TokenWindows
from model.data.tokenizer import Tokenizer
from model.training.probe import Probe
from storage.snapshots.data_snapshot import OpenSnapshot, open_snapshot
from storage.snapshots.shard_prefetch import verify_ahead
from storage.stores.object_store import ObjectStore
from tasks.data.source_weights import weighted_components
from tasks.trainer.trainer_protocol import TrainerSpec

_DOWNLOADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """Tokens and their order; `probe` is None where none is asked for, `files` are the train shards on this disk."""

    windows: TokenWindows
    order: SampleOrder
    probe: Probe | None
    vocab_size: int
    end_of_text_id: int
    files: tuple[Path, ...]

    @classmethod
    def opened(cls, store: ObjectStore, order: TrainerSpec) -> Self:
        """Open the order's snapshot; its shards are verified ahead, in the background."""
        snapshot = open_snapshot(store, order.snapshot_id, order.cache_dir)
        verify_ahead(snapshot.train, threads=_DOWNLOADS)
        manifest = snapshot.manifest
        windows = TokenWindows(snapshot.train, order.model.block_size, manifest.vocab_size)
        return cls(
            windows=windows,
            order=SampleOrder(
                window_count=windows.window_count,
                seed=order.training.seed,
                global_batch=order.training.global_batch,
                quarantined=frozenset(order.quarantined),
                components=weighted_components(manifest, order.data, order.model.block_size),
            ),
            probe=_probe(order, snapshot),
            vocab_size=manifest.vocab_size,
            end_of_text_id=manifest.end_of_text_id,
            files=snapshot.train_files,
        )


def _probe(order: TrainerSpec, snapshot: OpenSnapshot) -> Probe | None:
    if not order.training.probe_every_steps:
        return None
    tokenizer = Tokenizer.from_json(snapshot.tokenizer_json)
    return Probe(
        windows=TokenWindows(snapshot.val, order.model.block_size, snapshot.manifest.vocab_size),
        every_steps=order.training.probe_every_steps,
        batches=order.training.probe_batches,
        batch_size=order.micro_batch,
        sample_tokens=order.training.sample_tokens,
        prompt_ids=tokenizer.encode_prompt(order.prompt),
        decode=tokenizer.decode,
    )
