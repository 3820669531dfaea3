"""Reads Parquet files of unknown origin in a child process with bounded memory, without credentials.

A file of some hundred bytes may ask for any amount of memory: its pages and dictionaries say themselves how long they
become. Source: https://parquet.apache.org/docs/file-format/.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as parquet

from storage.errors import IntegrityError

ROWS = b"cairn.rows"
_BATCH_ROWS, _BATCH_BYTES = 256, 8 << 20
_LEAST_ROWS = 1 << 20
_LEAST_BYTES, _MOST_EXPANSION = 64 << 20, 256
_LEAST_MEMORY_BYTES, _MEMORY_SHARE = 1 << 30, 16
_OUT_OF_MEMORY = 3
_KEPT_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")
_SETTINGS = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def most_bytes(stored_bytes: int) -> int:
    """Return how many bytes of text may come out of a compressed file of this size."""
    return _LEAST_BYTES + _MOST_EXPANSION * stored_bytes


def read_parquet(
    file: IO[bytes], columns: Sequence[str], *, first_group: int = 0
) -> Generator[pa.RecordBatch, None, None]:
    """Yield an empty batch, whose schema has the columns that the file has and in `ROWS` its rows; then the rows.

    Text is large_binary. `file` is open at its start, with a descriptor. Raises IntegrityError if it cannot be read.
    """
    size_bytes = os.fstat(file.fileno()).st_size
    memory_bytes = _LEAST_MEMORY_BYTES + _MEMORY_SHARE * size_bytes
    order = json.dumps([list(columns), first_group, size_bytes, memory_bytes])
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    command = [sys.executable, "-P", "-m", "storage.snapshots.parquet_process", order]
    child = subprocess.Popen(
        command,
        stdin=file,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=kept | _SETTINGS,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stderr is not None
    try:
        with child.stdout, child.stderr:
            said = "it ended in the middle"
            with suppress(pa.ArrowException), pa.ipc.open_stream(child.stdout) as batches:  # or the child has died
                yield from batches
                said = ""
            said = child.stderr.read().decode("utf-8", "replace").strip().rpartition("\n")[2] or said
        if child.wait() == 0 and not said:
            return
    finally:
        child.kill()
        child.wait()
    if child.returncode == _OUT_OF_MEMORY or child.returncode < 0:
        rule = f"rule: at most {_LEAST_MEMORY_BYTES >> 20:,} MiB and {_MEMORY_SHARE} times its size"
        raise IntegrityError(
            f"it takes more than {memory_bytes >> 20:,} MiB of memory (its reader ended with {child.returncode}); "
            f"{rule}. Write it again with smaller row groups and shorter values"
        )
    raise IntegrityError(said)


def main() -> None:
    """Write the Parquet file on stdin to stdout as an Arrow stream."""
    columns, first_group, size_bytes, memory_bytes = json.loads(sys.argv[1])
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    least = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (least, least))
    try:
        with open(0, "rb") as file, open(1, "wb") as sink, parquet.ParquetFile(file) as table:
            _copy(table, columns, first_group, size_bytes, sink)
    except MemoryError:
        sys.exit(_OUT_OF_MEMORY)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        sys.exit(" ".join(str(error).split()))


def _copy(table: Any, columns: list[str], first_group: int, size_bytes: int, sink: IO[bytes]) -> None:
    rows, found = table.metadata.num_rows, table.schema_arrow
    if rows > _LEAST_ROWS + size_bytes:
        raise ValueError(f"it says that it has {rows:,} rows in {size_bytes:,} bytes; rule: at least a byte a row")
    fields = [found.field(name) for name in columns if found.get_field_index(name) >= 0]
    fields = [field.with_type(pa.large_binary()) if _holds_text(field.type) else field for field in fields]
    schema, left = pa.schema(fields, metadata={ROWS: str(rows)}), most_bytes(size_bytes)
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
        for group in range(first_group, table.num_row_groups if fields else 0):
            for batch in table.iter_batches(
                _batch_rows(table.metadata.row_group(group), schema.names),
                row_groups=[group],
                columns=schema.names,
                use_threads=False,
            ):
                cast = batch.cast(schema)
                left -= cast.nbytes
                if left < 0:
                    rule = f"at most {_MOST_EXPANSION} times its size and {_LEAST_BYTES >> 20} MiB"
                    raise ValueError(
                        f"its {size_bytes:,} bytes become more than {most_bytes(size_bytes):,}; rule: {rule}"
                    )
                writer.write_batch(cast)


def _batch_rows(group: Any, names: Sequence[str]) -> int:
    """Return how many rows are some megabytes, as the file says."""
    columns = [group.column(number) for number in range(group.num_columns)]
    wanted = [column for column in columns if column.path_in_schema.partition(".")[0] in names]
    size_bytes = max(1, sum(column.total_uncompressed_size for column in wanted))
    return int(max(1, min(_BATCH_ROWS, group.num_rows * _BATCH_BYTES // size_bytes)))


def _holds_text(kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(kind) for is_kind in (*texts, pa.types.is_binary, pa.types.is_large_binary))


if __name__ == "__main__":
    main()
