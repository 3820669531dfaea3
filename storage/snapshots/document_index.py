"""The document index of a data snapshot: one Parquet row a document in token order, and one a rejected document.

Written and read by row groups, in bounded memory. The key-value metadata holds the tokens before each row group.
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
from cairn.storage.snapshots.parquet_process import read_parquet

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
_DOCUMENT_SCHEMA, REJECTED_SCHEMA = (
    pa.schema([(key, _TYPES[kind]) for key, kind in row.__annotations__.items()]) for row in (DocumentRow, RejectedRow)
)


class RowWriter:
    """Context manager that writes records as Parquet row groups of one size: equal rows give equal bytes."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._metadata: dict[str, str] = {}
        self._schema, self._pending = schema, list[tuple[Any, ...]]()  # of a row group that is not complete
        self._writer = parquet.ParquetWriter(path, schema, compression="zstd")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._writer:
            if kind is None:  # after an error the file stays incomplete
                self._flush()
                self._writer.add_key_value_metadata(self._metadata)

    def append(self, row: Any) -> None:
        """Add a record whose fields are the columns."""
        self._pending.append(tuple(getattr(row, name) for name in self._schema.names))
        if len(self._pending) == ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            columns = zip(*self._pending, strict=True)
            arrays = [pa.array(column, type=kind) for column, kind in zip(columns, self._schema.types, strict=True)]
            self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
            self._pending.clear()


class DocumentIndexWriter(RowWriter):
    """Writes the document index; rows must come in the token order of each split."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _DOCUMENT_SCHEMA)
        self._tokens, self._starts = dict.fromkeys(SPLITS, 0), list[tuple[int, ...]]()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._metadata = {STARTS: msgspec.json.encode(self._starts).decode()}
        super().__exit__(kind, *rest)

    def append(self, row: DocumentRow) -> None:
        """Add the next document; raises ValueError for a split that is neither train nor val."""
        if row.split not in SPLITS:
            raise ValueError(f"split = {row.split!r}: must be one of {', '.join(SPLITS)}")
        if not self._pending:
            self._starts.append(tuple(self._tokens[split] for split in SPLITS))
        self._tokens[row.split] += row.tokens
        super().append(row)


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
        with path.open("rb") as file, closing(read_parquet(file, _DOCUMENT_SCHEMA.names, groups=groups)) as batches:
            unread = islice(batches if groups else (), 1, None)
            for group in groups:
                position = dict(zip(SPLITS, starts[group], strict=True))
                while rows[group] > 0:
                    table = pa.Table.from_batches([next(unread)]).cast(_DOCUMENT_SCHEMA)
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
