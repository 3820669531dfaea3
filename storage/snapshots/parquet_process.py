"""Reads Parquet files of unknown origin in a child process with bounded memory, without credentials.

A file of some hundred bytes may ask for any amount of memory: its pages and dictionaries say themselves how long they
become. Source: https://parquet.apache.org/docs/file-format/.
"""

import json
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as parquet

from cairn.storage.errors import IntegrityError
from cairn.storage.stores.child_process import bounded_process

ROWS, COLUMNS = b"cairn.rows", b"cairn.columns"
_MOST_NAMES = 100
_BATCH_ROWS, _BATCH_BYTES = 256, 8 << 20
_LEAST_ROWS = 1 << 20
_LEAST_BYTES, _MOST_EXPANSION = 64 << 20, 256
_REMEDY = "Write it again with smaller row groups and shorter values"


def most_bytes(stored_bytes: int) -> int:
    """Return how many bytes of text may come out of a compressed file of this size."""
    return _LEAST_BYTES + _MOST_EXPANSION * stored_bytes


def read_parquet(
    file: IO[bytes], columns: Sequence[str], *, groups: Sequence[int] | None = None
) -> Generator[pa.RecordBatch, None, None]:
    """Yield an empty batch, whose schema has the wanted columns, in `ROWS` its rows, in `COLUMNS` all names; the rows.

    Only those of the row groups given, if any are; no batch has rows of two. Text is large_binary. `file` is open at
    its start, with a descriptor. Raises IntegrityError if it cannot be read.
    """
    is_whole = False
    with (
        bounded_process(__name__, list(columns), groups and list(groups), file=file, remedy=_REMEDY) as stream,
        suppress(pa.ArrowException),  # the child has died
        pa.ipc.open_stream(stream) as batches,
    ):
        yield from batches
        is_whole = True
    if not is_whole:
        raise IntegrityError("it ended in the middle")


def run(columns: list[str], groups: list[int] | None) -> None:
    """Write the Parquet file on stdin to stdout as an Arrow stream."""
    try:
        with open(0, "rb") as file, open(1, "wb") as sink, parquet.ParquetFile(file) as table:
            _copy(table, columns, groups, os.fstat(file.fileno()).st_size, sink)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        sys.exit(" ".join(str(error).split()))


def _copy(table: Any, columns: list[str], wanted: list[int] | None, size_bytes: int, sink: IO[bytes]) -> None:
    rows, found = table.metadata.num_rows, table.schema_arrow
    if rows > _LEAST_ROWS + size_bytes:
        raise ValueError(f"it says that it has {rows:,} rows in {size_bytes:,} bytes; rule: at least a byte a row")
    fields = [found.field(name) for name in columns if found.get_field_index(name) >= 0]
    for place, field in enumerate(fields):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()):
            fields[place] = field.with_type(pa.large_binary())
    described_by = {ROWS: str(rows), COLUMNS: json.dumps(found.names[:_MOST_NAMES])}
    schema, written = pa.schema(fields, metadata=described_by), 0
    groups = (wanted or range(table.num_row_groups)) if fields else ()
    _check_growth(sum(_text_bytes(table.metadata.row_group(group), schema.names) for group in groups), size_bytes)
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
        for group in groups:
            described = table.metadata.row_group(group)
            # As many rows as are some megabytes, as the file says.
            most_rows = described.num_rows * _BATCH_BYTES // max(1, _text_bytes(described, schema.names))
            options = {"row_groups": [group], "columns": schema.names, "use_threads": False}
            for batch in table.iter_batches(int(max(1, min(_BATCH_ROWS, most_rows))), **options):
                cast = batch.cast(schema)
                written += cast.nbytes
                _check_growth(written, size_bytes)
                writer.write_batch(cast)


def _check_growth(text_bytes: int, size_bytes: int) -> None:
    if text_bytes > most_bytes(size_bytes):
        rule = f"at most {_MOST_EXPANSION} times its size and {_LEAST_BYTES >> 20} MiB"
        raise ValueError(f"its {size_bytes:,} bytes become more than {most_bytes(size_bytes):,}; rule: {rule}")


def _text_bytes(group: Any, names: Sequence[str]) -> int:
    """Return the size of the columns in a row group, as the file says; each value of a dictionary counts once."""
    columns = map(group.column, range(group.num_columns))
    wanted = (column for column in columns if column.path_in_schema.partition(".")[0] in names)
    return sum(int(column.total_uncompressed_size) for column in wanted)
