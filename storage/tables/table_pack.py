"""Writes the rows of runs into Parquet files (https://parquet.apache.org/docs/file-format/)."""

import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet

from storage.stores.verified_object import describe_file
from storage.tables.table_index import Column, PackedTable

_ROW_GROUP_ROWS = 122_880
_TYPES: Mapping[str, pa.DataType] = {
    "VARCHAR": pa.string(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
    "TIMESTAMP WITH TIME ZONE": pa.timestamp("us", tz="UTC"),
    "JSON": pa.dictionary(pa.int32(), pa.string()),
    "VARCHAR[]": pa.list_(pa.string()),
    "MAP(VARCHAR, DOUBLE)": pa.map_(pa.string(), pa.float64()),
    "MAP(VARCHAR, BIGINT)": pa.map_(pa.string(), pa.int64()),
    "MAP(VARCHAR, VARCHAR)": pa.map_(pa.string(), pa.string()),
}


def arrow_table(columns: Sequence[Column], rows: Sequence[Any]) -> pa.Table:
    """Return the rows as an Arrow table, an empty one of the same types if there are none."""
    arrays = []
    for column in columns:
        values = [getattr(row, column.name) for row in rows]
        if column.type.startswith("MAP"):
            values = [None if value is None else sorted(value.items()) for value in values]
        if column.type == "JSON":  # the attempts of a run repeat its configuration
            arrays.append(pa.array(values, pa.string()).dictionary_encode())
        else:
            arrays.append(pa.array(values, _TYPES[column.type]))
    return pa.Table.from_arrays(arrays, names=[column.name for column in columns])


def join_rows(
    columns: Sequence[Column],
    table: str,
    files: Mapping[str, Path],
    kept: Collection[str],
    made: Sequence[Mapping[str, Sequence[Any]]],
) -> pa.Table:
    """Return the rows of one table: those of the runs in `kept` from its file, and those that were made anew."""
    parts = []
    if kept:
        before = parquet.read_table(files[table], partitioning=None)
        parts.append(before.filter(compute.is_in(before["run_id"], pa.array(sorted(kept)))))
    parts.append(arrow_table(columns, [row for rows in made for row in rows[table]]))
    return pa.concat_tables(parts).unify_dictionaries()


def write_tables(folder: Path, tables: Mapping[str, pa.Table]) -> tuple[PackedTable, ...]:
    """Write a Parquet file for each table; raise OSError."""
    packed = []
    for table, rows in tables.items():
        temporary = folder / f".{uuid.uuid4().hex}"
        parquet.write_table(rows, temporary, compression="zstd", row_group_size=_ROW_GROUP_ROWS)
        written = describe_file(temporary)
        packed.append(PackedTable(table=table, bytes=written.bytes, sha256=written.sha256))
        os.replace(temporary, folder / packed[-1].file_name)
    return tuple(packed)
