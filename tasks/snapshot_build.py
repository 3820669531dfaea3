"""From text to a data snapshot: check, learn the tokenizer from train, encode, split, publish.

Owns the order of that work and the recipe that recognises it as done: what went in (content hashes, tokenizer,
settings) points to the snapshot that came out. Refuses to know the orchestrator. A recipe is only a cache: without
it, or with a broken one, the same snapshot is built again.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.configuration import DataConfig
from model.errors import InvalidInput
from model.tokenizer import Tokenizer
from storage.data_snapshot import (
    DOCUMENTS,
    SNAPSHOT_VERSION,
    TOKENIZER,
    DocumentRow,
    SnapshotManifest,
    SnapshotSource,
    SnapshotSplits,
    SplitName,
    SplitSize,
    damaged_objects,
    drop_damaged_copies,
    publish_snapshot,
    read_manifest,
    replace_object,
    write_document_index,
)
from storage.document import decode, encode, sha256
from storage.errors import IntegrityError, ObjectMissing, SnapshotDamaged
from storage.object_store import ObjectStore
from storage.token_shard import DEFAULT_SHARD_TOKENS, MAX_VOCAB_SIZE, ShardSchema, ShardWriter
from tasks.corpus import open_corpus
from tasks.document import Document, InvalidCorpus, Source
from tasks.document_split import Split, require_both_splits, split_of

RECIPE_VERSION = 1
BATCH_BYTES = 1 << 20
SMALLEST_VOCABULARY = 257


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotReference:
    """A published snapshot; ``reused`` says that its recipe was known and no text was tokenized."""

    snapshot_id: str
    manifest: SnapshotManifest
    reused: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSource:
    """One ingredient: a source by name and content."""

    name: str
    sha256: str
    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides a snapshot's bytes, known before any text is tokenized."""

    version: int
    sources: tuple[RecipeSource, ...]
    tokenizer: str
    val_fraction: float
    shard_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeResult:
    """What a recipe gave."""

    recipe: Recipe
    snapshot_id: str


def build_snapshot(
    store: ObjectStore, data: DataConfig, base_dir: Path, *, shard_tokens: int = DEFAULT_SHARD_TOKENS
) -> SnapshotReference:
    """Return the snapshot of ``data``, building it unless its recipe is known; relative paths start at ``base_dir``.

    Raises InvalidCorpus for text or settings that cannot be used, IntegrityError when the store keeps other bytes
    than it was given.
    """
    tokenizer = _given_tokenizer(data.tokenizer, base_dir)
    sources = open_corpus(data.sources, base_dir)
    recipe = Recipe(
        version=RECIPE_VERSION,
        sources=tuple(RecipeSource(name=item.name, sha256=item.sha256, unit=item.unit) for item in sources),
        tokenizer=f"sha256:{tokenizer.sha256}" if tokenizer else data.tokenizer,
        val_fraction=data.val_fraction,
        shard_tokens=shard_tokens,
    )
    known = _known_snapshot(store, recipe)
    if known:
        return known
    _require_splits(sources, data.val_fraction)
    tokenizer = tokenizer or _trained_tokenizer(sources, data)
    with tempfile.TemporaryDirectory(prefix="cairn-snapshot-") as staging:
        manifest = _stage(Path(staging), sources, tokenizer, data.val_fraction, shard_tokens)
        snapshot_id, manifest = publish_snapshot(store, Path(staging), manifest)
    store.write(_recipe_key(recipe), encode(RecipeResult(recipe=recipe, snapshot_id=snapshot_id)))
    return SnapshotReference(snapshot_id=snapshot_id, manifest=manifest, reused=False)


def repair_snapshot(store: ObjectStore, snapshot_id: str, data: DataConfig, base_dir: Path, cache_dir: Path) -> int:
    """Make damaged objects of a snapshot anew from its sources; returns how many, copies in `cache_dir` included.

    Raises `SnapshotDamaged` where the sources are gone or give other bytes now: then nothing was changed.
    """
    manifest = read_manifest(store, snapshot_id)
    dropped = drop_damaged_copies(cache_dir, manifest)
    damaged = damaged_objects(store, snapshot_id)
    if not damaged:
        return dropped
    try:
        with tempfile.TemporaryDirectory(prefix="cairn-snapshot-") as staging:
            _restage(Path(staging), data, base_dir)
            for item in damaged:
                replace_object(store, snapshot_id, item, Path(staging) / item.key)
    except (InvalidCorpus, InvalidInput, OSError) as error:
        names = ", ".join(item.key for item in damaged)
        why = f"{names} damaged, and its sources are not at hand: {error}"
        raise SnapshotDamaged(f"data/{snapshot_id}: {why}") from error
    return dropped + len(damaged)


def _restage(folder: Path, data: DataConfig, base_dir: Path) -> None:
    sources = open_corpus(data.sources, base_dir)
    tokenizer = _given_tokenizer(data.tokenizer, base_dir) or _trained_tokenizer(sources, data)
    _stage(folder, sources, tokenizer, data.val_fraction, DEFAULT_SHARD_TOKENS)


def check_block_size(manifest: SnapshotManifest, block_size: int) -> None:
    """Refuse a block_size that leaves a split without a single window of block_size + 1 tokens (InvalidCorpus)."""
    splits: tuple[SplitName, ...] = ("train", "val")
    name = min(splits, key=lambda split: manifest.split(split).tokens)
    tokens = manifest.split(name).tokens
    if block_size + 1 > tokens:
        raise InvalidCorpus(
            f"model.block_size = {block_size}: the {name} split has {tokens} tokens; rule: block_size is at most "
            f"{tokens - 1}, one less than the tokens of each split. Lower model.block_size or add text to data.sources"
        )


def _given_tokenizer(spec: str, base_dir: Path) -> Tokenizer | None:
    """Return the tokenizer that needs no training, or None for ``bpe:<size>``; refuse sizes no shard can hold."""
    kind, _, size = spec.partition(":")
    if kind == "bpe" and size.isdigit():
        _require_vocabulary(spec, int(size))
        return None
    try:
        tokenizer = Tokenizer.bytes() if spec == "bytes" else Tokenizer.from_file(base_dir / Path(spec).expanduser())
    except InvalidInput as error:
        raise InvalidCorpus(
            f"data.tokenizer = {spec!r}: {error}; rule: bytes, bpe:<size> or a tokenizer.json"
        ) from error
    _require_vocabulary(spec, tokenizer.vocab_size)
    return tokenizer


def _require_vocabulary(spec: str, size: int) -> None:
    # A tokenizer.json may have fewer ids than bytes, and still be right for its text; only bpe must hold every byte.
    smallest = SMALLEST_VOCABULARY if spec.startswith("bpe:") else 2
    if not smallest <= size <= MAX_VOCAB_SIZE:
        raise InvalidCorpus(
            f"data.tokenizer = {spec!r}: the vocabulary has {size} ids; rule: from {smallest} to {MAX_VOCAB_SIZE}"
        )


def _trained_tokenizer(sources: Sequence[Source], data: DataConfig) -> Tokenizer:
    # The tokenizer sees train only: a vocabulary learned from val would leak it.
    train = (item.text for item in _documents(sources) if split_of(item.sha256, data.val_fraction) is Split.TRAIN)
    try:
        return Tokenizer.train_bpe(train, int(data.tokenizer.partition(":")[2]))
    except InvalidInput as error:
        raise InvalidCorpus(f"data.tokenizer = {data.tokenizer!r}: {error}; rule: the text fills the size") from error


def _documents(sources: Sequence[Source]) -> Iterator[Document]:
    for source in sources:
        yield from source.documents()


def _require_splits(sources: Sequence[Source], val_fraction: float) -> None:
    held = {Split.TRAIN: 0, Split.VAL: 0}
    for document in _documents(sources):
        held[split_of(document.sha256, val_fraction)] += 1
        if all(held.values()):
            return
    require_both_splits(held[Split.TRAIN], held[Split.VAL], val_fraction)


def _stage(
    folder: Path, sources: Sequence[Source], tokenizer: Tokenizer, val_fraction: float, shard_tokens: int
) -> SnapshotManifest:
    """Write every file of the snapshot into ``folder`` and return its manifest, still without objects."""
    schema = ShardSchema(tokenizer_sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size)
    (folder / TOKENIZER).write_bytes(tokenizer.to_json().encode("utf-8"))
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(folder, split.value, schema, shard_tokens=shard_tokens))
            for split in Split
        }
        rows = [
            _write_document(document, ids, tokenizer.end_of_text_id, split, writers[split])
            for document, ids in _encoded(sources, tokenizer)
            for split in (split_of(document.sha256, val_fraction),)
        ]
    write_document_index(folder / DOCUMENTS, rows)
    documents_of = Counter(row.source for row in rows)
    return SnapshotManifest(
        version=SNAPSHOT_VERSION,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=tokenizer.end_of_text_id,
        val_fraction=val_fraction,
        splits=SnapshotSplits(train=_split_size(rows, Split.TRAIN), val=_split_size(rows, Split.VAL)),
        sources=tuple(_snapshot_source(item, documents_of[item.name]) for item in sources),
    )


def _encoded(sources: Sequence[Source], tokenizer: Tokenizer) -> Iterator[tuple[Document, list[int]]]:
    for batch in _batches(_documents(sources)):
        yield from zip(batch, tokenizer.encode_batch([document.text for document in batch]), strict=True)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    held_bytes = 0
    for document in documents:
        batch.append(document)
        held_bytes += document.bytes
        if held_bytes >= BATCH_BYTES:
            yield batch
            batch, held_bytes = [], 0
    if batch:
        yield batch


def _write_document(
    document: Document, ids: list[int], end_of_text_id: int, split: Split, writer: ShardWriter
) -> DocumentRow:
    # After every document, the last one too: a window never joins two texts without a mark between them.
    writer.append(np.asarray([*ids, end_of_text_id], dtype=np.int64))
    return DocumentRow(
        source=document.source,
        offset_bytes=document.offset_bytes,
        bytes=document.bytes,
        tokens=len(ids) + 1,
        split=split.value,
        sha256=document.sha256,
    )


def _split_size(rows: Sequence[DocumentRow], split: Split) -> SplitSize:
    held = [row for row in rows if row.split == split.value]
    return SplitSize(documents=len(held), tokens=sum(row.tokens for row in held), bytes=sum(row.bytes for row in held))


def _snapshot_source(source: Source, documents: int) -> SnapshotSource:
    return SnapshotSource(
        name=source.name,
        bytes=source.bytes,
        sha256=source.sha256,
        unit=source.unit,
        documents=documents,
    )


def _recipe_key(recipe: Recipe) -> str:
    return f"data/recipes/{sha256(encode(recipe))}.json"


def _known_snapshot(store: ObjectStore, recipe: Recipe) -> SnapshotReference | None:
    key = _recipe_key(recipe)
    try:
        snapshot_id = decode(store.read(key), RecipeResult, where=key).snapshot_id
        manifest = read_manifest(store, snapshot_id)
    except (ObjectMissing, IntegrityError):
        return None
    return SnapshotReference(snapshot_id=snapshot_id, manifest=manifest, reused=True)
