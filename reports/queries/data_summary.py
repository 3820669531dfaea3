"""The contents of a data snapshot and the source of a training window, for `cairn data`.

Reads the manifest and the parts of index and shards that it shows; each is verified first.
"""

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from model.configuration.data import SHORTEST_SNAPSHOT_ID, DataConfig
from model.data.source_mixture import window_range
from model.data.tokenizer import Tokenizer
from reports.errors import RunNotFound
from reports.queries.run_lookup import find_run
from storage.snapshots.data_snapshot import DOCUMENTS, TOKENIZER, SnapshotFiles, SnapshotManifest, snapshot_ids
from storage.snapshots.document_index import SPLITS, SplitName, documents_between
from storage.snapshots.token_shard import slices_between
from storage.stores.object_store import ObjectStore
from tasks.data.source_weights import weighted_groups
from tasks.errors import InvalidConfiguration

DEFAULT_BLOCK_SIZE = 256
_LISTED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowDocument:
    """A document a window takes tokens from: where it lies in its source, and which of its tokens the window begins at.

    ``first_token`` counts within the document and is 0 where the document begins inside the window; ``sha256`` is of
    its text.
    """

    source: str
    offset_bytes: int
    bytes: int
    sha256: str
    first_token: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSummary:
    """One training window: block_size inputs from ``first_token`` of its split on, as text, and its documents.

    ``groups`` are those its tokens, the last target too, belong to: empty where sources are not kept apart. One of
    train that has several is drawn by no step of a run with weights: then ``is_drawn`` is false, and also where the
    run is not known.
    """

    split: str
    window: int
    first_token: int
    text: str
    documents: tuple[WindowDocument, ...]
    groups: tuple[str, ...]
    is_drawn: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSummary:
    """How much a split holds, and in how many shards and windows."""

    documents: int
    tokens: int
    bytes: int
    shards: int
    windows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSummary:
    """One source: its size and hash, what a document is in it, and how many it gave."""

    name: str
    bytes: int
    sha256: str
    unit: str
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSummary:
    """Sources that are drawn together: their number and tokens, the windows of train that are wholly theirs.

    ``weight`` and ``share`` (of all draws, 0 to 1) are a run's: None where none was asked for, or it has no weights.
    """

    name: str
    sources: int
    train_tokens: int
    val_tokens: int
    windows: int
    weight: float | None
    share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """A snapshot: sizes, sources, splits, tokenizer, what was left out, and windows. Sizes are bytes."""

    snapshot_id: str
    run_id: str | None
    bytes: int
    tokenizer_sha256: str
    vocab_size: int
    end_of_text_id: int
    val_fraction: float
    block_size: int
    splits: dict[str, SplitSummary]
    sources: tuple[SourceSummary, ...]
    groups: tuple[GroupSummary, ...]
    rejected: dict[str, int]
    windows: tuple[WindowSummary, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowChoice:
    """Which window a person wants to see, None for a few; block_size 0 is the run's, or `DEFAULT_BLOCK_SIZE`."""

    window: int | None = None
    split: SplitName = "train"
    block_size: int = 0

    def __post_init__(self) -> None:
        """Refuse a size below zero."""
        if self.block_size < 0:
            raise InvalidConfiguration(f"--block-size {self.block_size}: must be at least 1")


def summarize_data(store: ObjectStore, reference: str, choice: WindowChoice, *, cache_dir: Path) -> DataSummary:
    """Look at the snapshot that `reference` names; raises `RunNotFound` where it names none."""
    found = _find(store, reference)
    block_size = choice.block_size or found.block_size or DEFAULT_BLOCK_SIZE
    files = SnapshotFiles(store, found.snapshot_id, cache_dir)
    manifest = files.manifest
    return DataSummary(
        snapshot_id=found.snapshot_id,
        run_id=found.run_id,
        bytes=sum(item.bytes for item in manifest.objects),
        tokenizer_sha256=manifest.tokenizer_sha256,
        vocab_size=manifest.vocab_size,
        end_of_text_id=manifest.end_of_text_id,
        val_fraction=manifest.val_fraction,
        block_size=block_size,
        splits={split: _split_view(manifest, split, block_size) for split in SPLITS},
        sources=tuple(
            SourceSummary(
                name=item.name, bytes=item.bytes, sha256=item.sha256, unit=item.unit, documents=item.documents
            )
            for item in manifest.sources
        ),
        groups=_group_views(manifest, found, block_size),
        rejected={item.kind: item.documents for item in manifest.rejected},
        windows=_windows(files, choice, found, block_size),
    )


def find_snapshot(store: ObjectStore, reference: str) -> tuple[str, str | None, int]:
    """Return snapshot id, run id and block size of a run's id, or of a snapshot's, which 8 characters begin uniquely.

    A snapshot by its own id has no run, and 0 as block size.
    """
    found = _find(store, reference)
    return found.snapshot_id, found.run_id, found.block_size


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    snapshot_id: str
    run_id: str | None = None
    block_size: int = 0
    data: DataConfig | None = None


def _find(store: ObjectStore, reference: str) -> _Found:
    snapshots = snapshot_ids(store)
    begins = [name for name in snapshots if name.startswith(reference) and len(reference) >= SHORTEST_SNAPSHOT_ID]
    if len(begins) == 1:
        return _Found(snapshot_id=begins[0])
    if begins:
        raise RunNotFound(f"{reference}: {len(begins)} snapshots begin so: {', '.join(begins)}")
    try:
        opened = find_run(store, reference).state.opened
    except RunNotFound as missing:
        listed = ", ".join(name[:12] for name in snapshots[:_LISTED]) or "none"
        raise RunNotFound(f"no snapshot {reference!r}, and {missing}; snapshots here: {listed}") from missing
    assert opened is not None
    model, data = opened.config.get("model"), opened.config.get("data")
    return _Found(
        snapshot_id=opened.data_snapshot,
        run_id=reference,
        block_size=int(model["block_size"]) if isinstance(model, dict) else 0,
        data=DataConfig.model_validate(data),
    )


def _group_views(manifest: SnapshotManifest, found: _Found, block_size: int) -> tuple[GroupSummary, ...]:
    weighted = weighted_groups(manifest, found.data) if found.data else ()
    weight_of = {item.group.name: item.weight for item in weighted}
    total = sum(weight_of.values())
    views, start = [], 0
    for group in manifest.known_groups:
        weight = weight_of.get(group.name)
        views.append(
            GroupSummary(
                name=group.name,
                sources=group.sources,
                train_tokens=group.train_tokens,
                val_tokens=group.val_tokens,
                windows=window_range(start, group.train_tokens, block_size)[1],
                weight=weight,
                share=None if weight is None else weight / total,
            )
        )
        start += group.train_tokens
    return tuple(views)


def _split_view(manifest: SnapshotManifest, split: SplitName, block_size: int) -> SplitSummary:
    size = manifest.split(split)
    return SplitSummary(
        documents=size.documents,
        tokens=size.tokens,
        bytes=size.bytes,
        shards=sum(item.key.startswith(f"{split}-") for item in manifest.objects),
        windows=_window_count(manifest, split, block_size),
    )


def _window_count(manifest: SnapshotManifest, split: SplitName, block_size: int) -> int:
    return (manifest.split(split).tokens - 1) // block_size


def _windows(files: SnapshotFiles, choice: WindowChoice, found: _Found, block_size: int) -> tuple[WindowSummary, ...]:
    tokenizer = Tokenizer.from_json(files.path(TOKENIZER).read_text(encoding="utf-8"))
    is_weighted = found.data is None or bool(found.data.weights)
    return tuple(
        _window_view(files, tokenizer, split, window, block_size, is_weighted=is_weighted)
        for split, window in _shown(files.manifest, choice, block_size)
    )


def _shown(manifest: SnapshotManifest, choice: WindowChoice, block_size: int) -> list[tuple[SplitName, int]]:
    if choice.window is None:
        counts = {split: _window_count(manifest, split, block_size) for split in SPLITS}
        chosen: dict[SplitName, set[int]] = {"train": {0, counts["train"] // 2, counts["train"] - 1}, "val": {0}}
        return [(split, window) for split in SPLITS for window in sorted(chosen[split]) if 0 <= window < counts[split]]
    count = _window_count(manifest, choice.split, block_size)
    if not 0 <= choice.window < count:
        raise InvalidConfiguration(
            f"--window {choice.window}: {choice.split} has windows 0 to {count - 1} of {block_size} tokens"
        )
    return [(choice.split, choice.window)]


def _window_view(
    files: SnapshotFiles, tokenizer: Tokenizer, split: SplitName, window: int, block_size: int, *, is_weighted: bool
) -> WindowSummary:
    first = window * block_size
    documents = documents_between(files.path(DOCUMENTS), split, first, first + block_size)
    groups = _groups_between(files.manifest, split, first, first + block_size + 1)
    tokens = np.concatenate(list(slices_between(files.shards(split), first, first + block_size)))
    return WindowSummary(
        split=split,
        window=window,
        first_token=first,
        text=tokenizer.decode(tokens.tolist()),
        documents=tuple(
            WindowDocument(
                source=place.row.source,
                offset_bytes=place.row.offset_bytes,
                bytes=place.row.bytes,
                sha256=place.row.sha256,
                first_token=max(0, first - place.first_token),
            )
            for place in documents
        ),
        groups=groups,
        is_drawn=split == "val" or len(groups) < 2 or not is_weighted,
    )


def _groups_between(manifest: SnapshotManifest, split: SplitName, first: int, end: int) -> tuple[str, ...]:
    ends = tuple(accumulate(group.tokens(split) for group in manifest.known_groups))
    starts = (0, *ends[:-1])
    spans = zip(manifest.known_groups, starts, ends, strict=False)
    return tuple(group.name for group, start, stop in spans if start < min(end, stop) and first < stop)
