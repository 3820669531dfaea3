"""Which data a run would learn from: the snapshot it has, one that is in the store, or text that is not tokenized yet.

Owns how much is known before anything is built. Refuses to tokenize and to write.
"""

from dataclasses import dataclass
from pathlib import Path

from model.data.tokenizer import Tokenizer
from storage.logs.run_state import RunState
from storage.snapshots.data_snapshot import SnapshotManifest, read_manifest
from storage.stores.object_store import ObjectStore
from tasks.configuration.run_configuration import RunConfig
from tasks.data.corpus import preview_corpus
from tasks.data.document_reader import ReadingRules
from tasks.data.snapshot_build import find_built
from tasks.data.snapshot_choice import chosen_snapshot

_BYTES_AND_END = 257


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSource:
    """A file or built-in text, by the name a snapshot gives it, and its size."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedData:
    """What would be learned from; without a snapshot, `vocab_size` is what is asked for and tokens are not known."""

    snapshot_id: str | None
    sources: tuple[PlannedSource, ...]
    bytes: int
    train_tokens: int | None
    val_tokens: int | None
    vocab_size: int


def plan_data(store: ObjectStore, state: RunState, config: RunConfig, base_dir: Path) -> PlannedData:
    """Return the data of a run, or of one that would be opened; raises what is wrong with its sources."""
    if state.opened is not None:
        snapshot_id = state.opened.data_snapshot
        return _of_snapshot(snapshot_id, read_manifest(store, snapshot_id))
    if config.data.snapshot:
        chosen = chosen_snapshot(store, config.data.snapshot)
        return _of_snapshot(chosen.snapshot_id, chosen.manifest)
    rules = ReadingRules(text_field=config.data.text_field, max_document_bytes=config.data.max_document_bytes)
    groups = config.data.source_names if config.data.weights else ()
    sources = preview_corpus(config.data.sources, base_dir, rules, groups=groups)
    if built := find_built(store, config.data, base_dir, sources):
        return _of_snapshot(built.snapshot_id, built.manifest)
    return PlannedData(
        snapshot_id=None,
        sources=tuple(PlannedSource(name=source.name, bytes=source.bytes) for source in sources),
        bytes=sum(source.bytes for source in sources),
        train_tokens=None,
        val_tokens=None,
        vocab_size=_vocabulary(config, base_dir),
    )


def _of_snapshot(snapshot_id: str, manifest: SnapshotManifest) -> PlannedData:
    return PlannedData(
        snapshot_id=snapshot_id,
        sources=tuple(PlannedSource(name=source.name, bytes=source.bytes) for source in manifest.sources),
        bytes=sum(source.bytes for source in manifest.sources),
        train_tokens=manifest.split("train").tokens,
        val_tokens=manifest.split("val").tokens,
        vocab_size=manifest.vocab_size,
    )


def _vocabulary(config: RunConfig, base_dir: Path) -> int:
    data = config.data
    if data.tokenizer.endswith(".json"):
        return Tokenizer.from_file(base_dir / Path(data.tokenizer).expanduser()).vocab_size
    return data.bpe_vocab_size or _BYTES_AND_END
