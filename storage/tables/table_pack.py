"""Packs: the rows of many runs in a few Parquet files (https://parquet.apache.org/docs/file-format/)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from storage.stores.object_store import ObjectStore
from storage.stores.verified_object import describe_file, upload_file
from storage.tables.table_index import Column, Pack, PackedTable, RunStamp

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


class PackBuilder:
    """Collects the rows of runs for a pack."""

    def __init__(self, columns: Mapping[str, Sequence[Column]]) -> None:
        self._columns = columns
        self._tables: dict[str, list[pa.Table]] = {table: [] for table in columns}
        self.stamps: list[RunStamp] = []
        self.rows = 0

    def add(self, stamp: RunStamp, rows: Mapping[str, Sequence[Any]]) -> None:
        """Add all rows of a run."""
        self.stamps.append(stamp)
        for table, parts in self._tables.items():
            if rows[table]:
                parts.append(arrow_table(self._columns[table], rows[table]))
                self.rows += len(rows[table])

    def arrow(self, table: str) -> pa.Table:
        """Return the rows of one table added so far."""
        empty = arrow_table(self._columns[table], ())
        return pa.concat_tables([empty, *self._tables[table]]).unify_dictionaries()

    def publish(self, store: ObjectStore, prefix: str, *, spool: Path) -> Pack:
        """Write one Parquet object for each table under `prefix`; raise `StoreUnavailable` or OSError."""
        packed = []
        for table in self._tables:
            path = spool / f"{table}.parquet"
            parquet.write_table(self.arrow(table), path, compression="zstd", row_group_size=_ROW_GROUP_ROWS)
            written = describe_file(path)
            key = f"{prefix}/{written.sha256}.parquet"
            upload_file(store, key, path)
            packed.append(PackedTable(table=table, key=key, bytes=written.bytes, sha256=written.sha256))
            path.unlink()
        return Pack(tables=tuple(packed), runs=tuple(self.stamps), rows=self.rows)
