"""The manifest of a data snapshot, `snapshot.json`, and its document index, one Parquet row a document in token order.

The index is written and read by row groups, in bounded memory; its key-value metadata holds the tokens before each.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from cairn.storage.errors import IntegrityError
from cairn.storage.snapshots import token_shard
from cairn.storage.snapshots.parquet_process import read_parquet
from cairn.storage.stores.object_store import ExpectedObject, is_key

ROW_GROUP_ROWS = 32 * 1024
STARTS = "cairn.token_starts"
_MOST_GROUPS = 1 << 16
SplitName: TypeAlias = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentRow:
    """One document: its place in its source, size, split and content hash; `tokens` counts its end-of-text token."""

    source: str
    offset_bytes: int
    bytes: int
    tokens: int
    split: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedRow:
    """One rejected document: its place in its source, and what is wrong with it."""

    source: str
    offset_bytes: int
    kind: str
    detail: str


_TYPES = {str: pa.string(), int: pa.int64()}
DOCUMENT_SCHEMA, REJECTED_SCHEMA = (
    pa.schema([(key, _TYPES[kind]) for key, kind in row.__annotations__.items()]) for row in (DocumentRow, RejectedRow)
)
_TOKENS, _SPLIT = (DOCUMENT_SCHEMA.get_field_index(name) for name in ("tokens", "split"))


class RowWriter:
    """Context manager that writes records as Parquet row groups of one size: equal rows give equal bytes.

    Rows of `DOCUMENT_SCHEMA`, the document index, must come in the token order of each split.
    """

    def __init__(self, path: Path, schema: pa.Schema = DOCUMENT_SCHEMA) -> None:
        self._schema, self._pending = schema, list[tuple[Any, ...]]()  # of a row group that is not complete
        self._writer = parquet.ParquetWriter(path, schema, compression="zstd")
        self._tokens, self._starts = dict.fromkeys(SPLITS, 0), list[tuple[int, ...]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._writer:
            if kind is None:  # after an error the file stays incomplete
                self._flush()
                starts = {STARTS: msgspec.json.encode(self._starts).decode()} if self._schema is DOCUMENT_SCHEMA else {}
                self._writer.add_key_value_metadata(starts)

    def extend(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Add rows of the columns' values; raises ValueError for a document's split that is neither train nor val."""
        if self._schema is DOCUMENT_SCHEMA and (foreign := {row[_SPLIT] for row in rows}.difference(SPLITS)):
            raise ValueError(f"split = {foreign.pop()!r}: must be one of {', '.join(SPLITS)}")
        while rows:
            free = ROW_GROUP_ROWS - len(self._pending)
            self._pending += rows[:free]
            rows = rows[free:]
            if len(self._pending) == ROW_GROUP_ROWS:
                self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._starts.append(tuple(self._tokens.values()))
            for split in SPLITS if self._schema is DOCUMENT_SCHEMA else ():
                self._tokens[split] += sum(row[_TOKENS] for row in self._pending if row[_SPLIT] == split)
            columns = zip(*self._pending, strict=True)
            arrays = [pa.array(column, type=kind) for column, kind in zip(columns, self._schema.types, strict=True)]
            self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
            self._pending.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPlace:
    """A document and its first token in its split."""

    row: DocumentRow
    first_token: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpan:
    """The tokens [start, stop) of a split."""

    split: SplitName
    start: int
    stop: int


def documents_between(path: Path, spans: Sequence[TokenSpan]) -> tuple[tuple[DocumentPlace, ...], ...]:
    """Return the documents of each span, by one process from their row groups alone; raises IntegrityError."""
    found, wanted = [list[DocumentPlace]() for _ in spans], set[int]()
    try:
        with parquet.ParquetFile(path, thrift_container_size_limit=_MOST_GROUPS) as index:
            starts = msgspec.json.decode((index.metadata.metadata or {})[STARTS.encode()], type=list[tuple[int, int]])
            for span in spans:
                begins = [start[SPLITS.index(span.split)] for start in starts]
                wanted.update(range(max(0, bisect_right(begins, span.start) - 1), bisect_left(begins, span.stop)))
            groups = sorted(wanted)
            rows = {group: index.metadata.row_group(group).num_rows for group in groups}
        with path.open("rb") as file, closing(read_parquet(file, DOCUMENT_SCHEMA.names, groups=groups)) as batches:
            unread = islice(batches if groups else (), 1, None)
            for group in groups:
                position = dict(zip(SPLITS, starts[group], strict=True))
                while rows[group] > 0:
                    table = pa.Table.from_batches([next(unread)]).cast(DOCUMENT_SCHEMA)
                    rows[group] -= table.num_rows
                    _find_places(table, position, spans, found)
    except (pa.ArrowException, OSError, TypeError, ValueError, LookupError, StopIteration, IntegrityError) as error:
        raise IntegrityError(f"{path}: not a readable document index: {error}") from error
    return tuple(map(tuple, found))


def _find_places(
    rows: pa.Table, position: dict[SplitName, int], spans: Sequence[TokenSpan], found: list[list[DocumentPlace]]
) -> None:
    """Add the rows of each span to what was found, and move the position of each split behind them."""
    for split in SPLITS:
        sizes = np.where(compute.equal(rows["split"], split).to_numpy(), rows["tokens"].to_numpy(), 0)
        ends = position[split] + np.cumsum(sizes)
        for span, places in zip(spans, found, strict=True):
            if span.split == split:
                wanted = np.flatnonzero((sizes > 0) & (ends > span.start) & (ends - sizes < span.stop))
                for row, end in zip(rows.take(wanted).to_pylist(), ends[wanted].tolist(), strict=True):
                    places.append(DocumentPlace(row=DocumentRow(**row), first_token=end - row["tokens"]))
        position[split] += int(sizes.sum())


SNAPSHOT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSize:
    """The size of a split: `bytes` of UTF-8 text, `tokens` including end-of-text tokens."""

    documents: int
    tokens: int
    bytes: int

    def __post_init__(self) -> None:
        for name in ("documents", "tokens", "bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: a split holds at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSplits:
    """The sizes of both splits."""

    train: SplitSize
    val: SplitSize


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotObject(ExpectedObject):
    """One object of the snapshot, by its name in the snapshot's folder; only token shards have `tokens`."""

    tokens: int | None = None

    def __post_init__(self) -> None:
        if "/" in self.key or not is_key(self.key):
            raise ValueError(f"key = {self.key[:80]!r}: must be a plain file name")
        if self.bytes < 0 or (self.tokens is not None and self.tokens < 0):
            raise ValueError(f"{self.key}: bytes {self.bytes}, tokens {self.tokens}: must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSource:
    """A source of text: its name, its content, and its number of documents; `unit` is what a document is in it."""

    name: str
    bytes: int
    sha256: str
    unit: str
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedCount:
    """Number of documents rejected for one `kind` of fault; `rejected.parquet` lists them."""

    kind: str
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotGroup:
    """An entry of `data.sources`, of so many `sources`: contiguous in each split, so that it can be drawn by weight."""

    name: str
    sources: int
    train_tokens: int
    val_tokens: int

    def tokens(self, split: SplitName) -> int:
        """Return its tokens of a split."""
        return self.train_tokens if split == "train" else self.val_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotAnswers:
    """The tokens of conversations that the loss counts; `inner_ends` are end-of-text tokens within conversations."""

    train_tokens: int
    val_tokens: int
    inner_ends: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotManifest:
    """The content of a snapshot; the snapshot id is the SHA-256 of its encoded bytes."""

    version: int
    tokenizer_sha256: str
    vocab_size: int
    end_of_text_id: int
    val_fraction: float
    splits: SnapshotSplits
    sources: tuple[SnapshotSource, ...]
    objects: tuple[SnapshotObject, ...] = ()
    rejected: tuple[RejectedCount, ...] = ()
    # Written only if there are some: a snapshot without groups has one id.
    groups: tuple[SnapshotGroup, ...] | msgspec.UnsetType = msgspec.UNSET
    # Only of conversations; of any other text the loss counts every token.
    answers: SnapshotAnswers | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.version != SNAPSHOT_VERSION:
            raise ValueError(f"version = {self.version}: only {SNAPSHOT_VERSION} is read; update cairn")
        if not 0 <= self.end_of_text_id < self.vocab_size:
            raise ValueError(f"end_of_text_id = {self.end_of_text_id}: must be below vocab_size = {self.vocab_size}")
        for split in SPLITS if self.known_groups else ():
            held, promised = sum(group.tokens(split) for group in self.known_groups), self.split(split).tokens
            if held != promised:
                raise ValueError(f"groups hold {held} tokens of {split}: must be all of its {promised}")

    @property
    def known_groups(self) -> tuple[SnapshotGroup, ...]:
        """The groups in token order; empty without weights."""
        return () if isinstance(self.groups, msgspec.UnsetType) else self.groups

    @property
    def shard_schema(self) -> token_shard.ShardSchema:
        """The schema of every shard."""
        return token_shard.ShardSchema(tokenizer_sha256=self.tokenizer_sha256, vocab_size=self.vocab_size)

    def split(self, name: SplitName) -> SplitSize:
        """Return the size of a split."""
        return self.splits.train if name == "train" else self.splits.val

    def bytes_per_token(self, name: SplitName) -> float:
        """Return UTF-8 bytes of text per token of a split, end-of-text tokens included."""
        return self.split(name).bytes / self.split(name).tokens
