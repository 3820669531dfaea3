"""The data a run would learn from: its snapshot, one in the store, or text that is not tokenized yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model.configuration.data import SMALLEST_BPE_VOCABULARY, DataConfig
from storage.logs.run_state import RunState
from storage.snapshots.data_snapshot import read_manifest
from storage.snapshots.document_index import SPLITS, SplitName
from storage.snapshots.snapshot_manifest import SnapshotManifest
from storage.stores.object_store import ObjectStore
from tasks.configuration.run_configuration import RunConfig
from tasks.data.corpus import preview_corpus
from tasks.data.document import Source
from tasks.data.document_reader import rules_of
from tasks.data.foreign_tokenizer import read_tokenizer
from tasks.data.snapshot_build import find_built
from tasks.data.snapshot_lookup import find_by_id


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSource:
    """A file or built-in text, by the name a snapshot gives it, and its size."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedData:
    """The data; without a snapshot `vocab_size` is the one asked for, and bytes stand for tokens, if they are known."""

    snapshot_id: str | None
    sources: tuple[PlannedSource, ...]
    bytes: int
    train_tokens: int | None
    val_tokens: int | None
    train_bytes: int | None
    val_bytes: int | None
    val_fraction: float
    vocab_size: int


def plan_data(store: ObjectStore, state: RunState, config: RunConfig, base_dir: Path) -> PlannedData:
    """Return the data of a run, or of one that would be opened; raises `InvalidCorpus` for unusable sources."""
    if state.opened is not None:
        snapshot_id = state.opened.data_snapshot
        return _of_snapshot(snapshot_id, read_manifest(store, snapshot_id))
    if config.data.snapshot:
        chosen = find_by_id(store, config.data.snapshot)
        return _of_snapshot(chosen.snapshot_id, chosen.manifest)
    sources = preview_sources(config.data, base_dir)
    if built := find_built(store, config.data, base_dir, sources):
        return _of_snapshot(built.snapshot_id, built.manifest)
    sizes = _split_bytes(sources, config.data.val_fraction)
    return PlannedData(
        snapshot_id=None,
        sources=tuple(PlannedSource(name=source.name, bytes=source.bytes) for source in sources),
        bytes=sum(source.bytes for source in sources),
        train_tokens=None,
        val_tokens=None,
        train_bytes=sizes.get("train"),
        val_bytes=sizes.get("val"),
        val_fraction=config.data.val_fraction,
        vocab_size=wanted_vocab_size(config.data, base_dir),
    )


def preview_sources(data: DataConfig, base_dir: Path) -> tuple[Source, ...]:
    """Return the sources of text, none read yet; raises `InvalidCorpus`."""
    return preview_corpus(data.sources, base_dir, rules_of(data), groups=data.source_names if data.weights else ())


def wanted_vocab_size(data: DataConfig, base_dir: Path) -> int:
    """Return how many ids the tokenizer that the configuration asks for has."""
    if data.tokenizer.endswith(".json"):
        return read_tokenizer(base_dir / Path(data.tokenizer).expanduser()).vocab_size
    return data.bpe_vocab_size or SMALLEST_BPE_VOCABULARY


def _split_bytes(sources: Sequence[Source], val_fraction: float) -> dict[SplitName, int]:
    """Return the bytes of text in each split; empty for text that was not looked at because there is much of it."""
    if not all(source.sha256 or source.border is not None for source in sources):
        return {}
    sizes = dict.fromkeys(SPLITS, 0)
    for source in sources:
        for split, size_bytes in source.sizes(val_fraction):
            sizes[split] += size_bytes
    return sizes


def _of_snapshot(snapshot_id: str, manifest: SnapshotManifest) -> PlannedData:
    return PlannedData(
        snapshot_id=snapshot_id,
        sources=tuple(PlannedSource(name=source.name, bytes=source.bytes) for source in manifest.sources),
        bytes=sum(source.bytes for source in manifest.sources),
        train_tokens=manifest.split("train").tokens,
        val_tokens=manifest.split("val").tokens,
        train_bytes=manifest.split("train").bytes,
        val_bytes=manifest.split("val").bytes,
        val_fraction=manifest.val_fraction,
        vocab_size=manifest.vocab_size,
    )
