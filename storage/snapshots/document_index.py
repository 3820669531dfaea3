"""The document index: where every document of a data snapshot came from, and the listing of those that were left out.

Owns two Parquet files: one row a document in the order of the token stream, so that a token position leads back to
its source. Both are written row group by row group and read the same way, in bounded memory. Refuses to know tokens
and stores. Source: Apache Parquet format; the tokens before each row group stand in the file's key-value metadata.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from storage.errors import IntegrityError

ROW_GROUP_ROWS = 32 * 1024
STARTS = "cairn.token_starts"
SplitName: TypeAlias = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")

_DOCUMENT_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("offset_bytes", pa.int64()),
        ("bytes", pa.int64()),
        ("tokens", pa.int64()),
        ("split", pa.string()),
        ("sha256", pa.string()),
    ]
)
_REJECTED_SCHEMA = pa.schema(
    [("source", pa.string()), ("offset_bytes", pa.int64()), ("kind", pa.string()), ("detail", pa.string())]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentRow:
    """One line of the document index: where a document lay in its source, its size, split and content hash.

    ``tokens`` counts the end-of-text token after the document.
    """

    source: str
    offset_bytes: int
    bytes: int
    tokens: int
    split: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedRow:
    """One document that was left out: where it lay in its source, what kind of fault it has, and the fault itself."""

    source: str
    offset_bytes: int
    kind: str
    detail: str


class DocumentIndexWriter:
    """Writes the document index as it comes; a context manager. Holds `ROW_GROUP_ROWS` rows in memory.

    Rows must come in the order of the token stream: a split's shards hold its documents in this order. Equal rows give
    equal bytes, however they were appended.
    """

    def __init__(self, path: Path) -> None:
        """Create the file at `path`; one that is there is overwritten."""
        self._rows = _RowGroups(path, _DOCUMENT_SCHEMA)
        self._tokens = dict.fromkeys(SPLITS, 0)
        self._starts: list[tuple[int, ...]] = []

    def __enter__(self) -> "DocumentIndexWriter":
        """Return the writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the last row group and the footer; an error on its way leaves a file that is no index."""
        starts = {STARTS: msgspec.json.encode(self._starts).decode()}
        self._rows.close(metadata=starts if kind is None else None)

    def append(self, row: DocumentRow) -> None:
        """Add the next document; raises ValueError for a split that is neither train nor val."""
        if row.split not in SPLITS:
            raise ValueError(f"split = {row.split!r}: must be one of {', '.join(SPLITS)}")
        if self._rows.at_group_start:
            self._starts.append(tuple(self._tokens[split] for split in SPLITS))
        self._tokens[row.split] += row.tokens
        self._rows.append((row.source, row.offset_bytes, row.bytes, row.tokens, row.split, row.sha256))


class RejectedWriter:
    """Writes the listing of documents that were left out; a context manager with the same bound on memory."""

    def __init__(self, path: Path) -> None:
        """Create the file at `path`; one that is there is overwritten."""
        self._rows = _RowGroups(path, _REJECTED_SCHEMA)

    def __enter__(self) -> "RejectedWriter":
        """Return the writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the last row group and the footer."""
        self._rows.close(metadata={} if kind is None else None)

    def append(self, row: RejectedRow) -> None:
        """Add the next document that was left out."""
        self._rows.append((row.source, row.offset_bytes, row.kind, row.detail))


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPlace:
    """A document and where it begins in its split's token stream."""

    row: DocumentRow
    first_token: int


def documents_between(path: Path, split: SplitName, start: int, stop: int) -> Iterator[DocumentPlace]:
    """Yield the documents that tokens [start, stop) of a split belong to, in order.

    Reads the footer and as many row groups as hold them; an index without starts is read from its beginning. Raises
    IntegrityError where the file is no document index.
    """
    try:
        with parquet.ParquetFile(path, memory_map=True) as index:
            group, position = _first_group(index, split, start)
            while position < stop and group < index.num_row_groups:
                sizes = _tokens_of(index, group, split)
                ends = position + np.cumsum(sizes)
                wanted = np.flatnonzero((sizes > 0) & (ends > start) & (ends - sizes < stop))
                if len(wanted):
                    for row, end in zip(_rows_of(index, group, wanted), ends[wanted].tolist(), strict=True):
                        yield DocumentPlace(row=row, first_token=end - row.tokens)
                position, group = position + int(sizes.sum()), group + 1
    except (pa.ArrowException, OSError, TypeError, msgspec.DecodeError) as error:
        raise IntegrityError(f"{path}: not a readable document index: {error}") from error


def read_documents(path: Path) -> Iterator[DocumentRow]:
    """Yield every row in order, one row group in memory."""
    with parquet.ParquetFile(path, memory_map=True) as index:
        for group in range(index.num_row_groups):
            yield from _rows_of(index, group)


def _first_group(index: parquet.ParquetFile, split: SplitName, token: int) -> tuple[int, int]:
    """Return the row group that holds the token, and the token it begins at."""
    listed = (index.metadata.metadata or {}).get(STARTS.encode())
    if not listed:
        return 0, 0
    starts = [start[SPLITS.index(split)] for start in msgspec.json.decode(listed, type=list[tuple[int, int]])]
    group = max(0, bisect_right(starts, token) - 1)
    return group, starts[group] if starts else 0


def _tokens_of(index: parquet.ParquetFile, group: int, split: SplitName) -> NDArray[np.int64]:
    """Return the tokens (R,) of each row of a row group, 0 where it is of another split."""
    table = index.read_row_group(group, columns=["tokens", "split"])
    is_wanted = compute.equal(table["split"], split).to_numpy(zero_copy_only=False)
    return np.where(is_wanted, table["tokens"].to_numpy(), 0)


def _rows_of(index: parquet.ParquetFile, group: int, rows: NDArray[np.int64] | None = None) -> Iterator[DocumentRow]:
    table = index.read_row_group(group)
    for fields in (table if rows is None else table.take(rows)).to_pylist():
        yield DocumentRow(**fields)


class _RowGroups:
    """A Parquet file in row groups of one size, whatever the appends: equal rows give equal bytes."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema, self._pending = schema, list[tuple[Any, ...]]()
        self._writer = parquet.ParquetWriter(path, schema, compression="zstd")

    @property
    def at_group_start(self) -> bool:
        return not self._pending

    def append(self, row: tuple[Any, ...]) -> None:
        self._pending.append(row)
        if len(self._pending) == ROW_GROUP_ROWS:
            self._flush()

    def close(self, *, metadata: dict[str, str] | None) -> None:
        """Finish the file, or give it up where there is no metadata."""
        try:
            if metadata is not None:
                self._flush()
                self._writer.add_key_value_metadata(metadata)
        finally:
            self._writer.close()

    def _flush(self) -> None:
        if self._pending:
            columns = [
                pa.array(column, type=kind)
                for column, kind in zip(zip(*self._pending, strict=True), self._schema.types, strict=True)
            ]
            self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
            self._pending.clear()
