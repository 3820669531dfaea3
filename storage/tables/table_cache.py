"""The tables of all runs of a store; the rows of unchanged runs come from packs, a cache on this machine.

A pack has the rows of some runs, a Parquet file (https://parquet.apache.org/docs/file-format/) for each table, and the
entry of each run at which they were made. Arrow loads slowly: only what makes or reads rows imports it.
"""

import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from cairn.storage.errors import IntegrityError, StorageError
from cairn.storage.logs import log_entry, run_entries, run_log, run_state, step_log
from cairn.storage.stores import codec, object_store

if TYPE_CHECKING:
    import pyarrow as pa

PACK = "pack.json"
_RunRows = Mapping[str, Sequence[Any]]
_ROW_GROUP_ROWS = 122_880


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column and its SQL type."""

    name: str
    type: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStamp:
    """A run's rows are current while its log ends with this entry and, with steps, its step log has this size."""

    run_id: str
    seq: int
    entry_sha256: str
    latest_attempt: int
    claim_id: str = ""
    steps_bytes: int | None
    owner: run_entries.Placement | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTable(object_store.WrittenObject):
    """One table of a pack: a Parquet file named by its SHA-256."""

    table: str

    @property
    def file_name(self) -> str:
        """The file's name in the pack's folder."""
        return f"{self.table}-{self.sha256}.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """The tables of a pack, and the runs whose rows they have; one of another `version` is not used."""

    version: str
    tables: tuple[PackedTable, ...]
    runs: tuple[RunStamp, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableKind:
    """Tables made together; packs of another `version` are not used, a run's rows `with_steps` have their own pack."""

    name: str
    version: str
    tables: Mapping[str, Sequence[Column]]
    make: Callable[[str, run_state.RunState], _RunRows]
    with_steps: bool = False
    packs: int = 32  # few files to read, and little to write where a run has moved

    def pack_of(self, run_id: str) -> str:
        """Return the name of the pack that has the rows of a run."""
        return run_id if self.with_steps else f"{crc32(run_id.encode()) % self.packs:02d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredTables:
    """All rows of the wanted tables, in verified Parquet files and Arrow tables; and why runs could not be read."""

    parts: Mapping[str, "list[Path | pa.Table]"]
    stamps: list[RunStamp] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)


class TableCache:
    """The packs of a store."""

    def __init__(self, store: object_store.ObjectStore, folder: Path) -> None:
        """Keep the packs in `folder`, which is of this store alone."""
        self._store, self._folder = store, folder

    def gather(self, kind: TableKind, run_ids: Sequence[str], wanted: Collection[str]) -> GatheredTables:
        """Return all rows of the `wanted` tables of these runs; raise `StoreUnavailable` if the store is away."""
        members = defaultdict[str, list[str]](list)
        for run_id in run_ids:
            members[kind.pack_of(run_id)].append(run_id)
        folder, here = self._folder / kind.name, set(run_ids)
        packs = {name: read_pack(folder / name, kind.version) for name in sorted(members)}
        stamps = [stamp for pack in packs.values() if pack for stamp in pack.runs if stamp.run_id in here]
        answers = object_store.ask_each(self._store, partial(is_current, self._store), stamps)
        current = frozenset(stamp.run_id for stamp in compress(stamps, answers))
        gathered = GatheredTables(parts={name: [] for name in wanted})
        fold = partial(self._fold, kind, gathered.unreadable)
        for name, pack in packs.items():
            place, packed = folder / name, pack.runs if pack else ()
            has_moved = not current.issuperset({*members[name], *(stamp.run_id for stamp in packed)})
            files = find_files(place, pack, kind.tables if has_moved else wanted) if pack else None
            kept = [stamp for stamp in packed if stamp.run_id in current] if files is not None else []
            known, tables = {stamp.run_id for stamp in kept}, dict[str, Any](files or {})
            moved = [run_id for run_id in members[name] if run_id not in known]
            runs = list(filter(None, object_store.ask_each(self._store, fold, moved)))
            gathered.stamps.extend(kept := [*kept, *(stamp for stamp, _ in runs)])
            if runs or len(known) < len(packed):  # the pack is written again: it has other runs, or one has moved
                for table, columns in kind.tables.items():
                    made = [row for _, rows in runs for row in rows[table]]
                    tables[table] = join_rows(columns, tables.get(table), known, made)
                with suppress(OSError):
                    place.mkdir(parents=True, exist_ok=True)
                    tables = write_pack(place, kind.version, tables, tuple(kept))
            for table in gathered.parts.keys() & tables.keys():
                gathered.parts[table].append(tables[table])
        with suppress(OSError):
            for name in set(os.listdir(folder)) - members.keys():
                shutil.rmtree(folder / name)
        return gathered

    def _fold(self, kind: TableKind, unreadable: dict[str, str], run_id: str) -> tuple[RunStamp, _RunRows] | None:
        """Return a run's rows with their stamp; None without a log, or with one that does not verify: `unreadable`."""
        log = run_log.RunLog(self._store, run_id)
        try:
            log.refresh()
        except IntegrityError as error:
            unreadable[run_id] = str(error)
        if log.head is None or run_id in unreadable:
            return None
        stamp = stamp_run(self._store, run_id, log.head, log.state, with_steps=kind.with_steps)
        return stamp, kind.make(run_id, log.state)


def read_pack(folder: Path, version: str) -> Pack | None:
    """Return the pack in the folder, None if it is missing, damaged or of another version."""
    with suppress(OSError, IntegrityError):
        pack = codec.decode((folder / PACK).read_bytes(), Pack, where=str(folder))
        return pack if pack.version == version else None
    return None


def write_pack(
    folder: Path, version: str, tables: Mapping[str, "pa.Table"], runs: tuple[RunStamp, ...]
) -> dict[str, Path]:
    """Make this the folder's pack, delete the files of others, and return its own; of two writers the last one wins."""
    import pyarrow.parquet as parquet

    packed = list[PackedTable]()
    for table, rows in tables.items():
        temporary = folder / f".{uuid.uuid4().hex}"
        parquet.write_table(rows, temporary, compression="zstd", row_group_size=_ROW_GROUP_ROWS)
        written = object_store.describe_file(temporary)
        packed.append(PackedTable(table=table, bytes=written.bytes, sha256=written.sha256))
        os.replace(temporary, folder / packed[-1].file_name)
    temporary = folder / f".{uuid.uuid4().hex}"
    temporary.write_bytes(codec.encode(Pack(version=version, tables=tuple(packed), runs=runs)))
    os.replace(temporary, folder / PACK)
    files = {item.table: folder / item.file_name for item in packed}
    for path in set(folder.iterdir()) - {folder / PACK, *files.values()}:
        path.unlink(missing_ok=True)
    return files


def find_files(folder: Path, pack: Pack, tables: Collection[str]) -> Mapping[str, Path] | None:
    """Return the files of these tables, None if one is missing or damaged."""
    packed = {folder / item.file_name: item for item in pack.tables if item.table in tables}
    with suppress(OSError):
        if all(item.has_bytes_of(object_store.describe_file(path)) for path, item in packed.items()):
            return {item.table: path for path, item in packed.items()}
    return None


def stamp_run(
    store: object_store.ObjectStore, run_id: str, head: log_entry.ReadEntry, state: run_state.RunState, with_steps: bool
) -> RunStamp:
    """Return the stamp of rows that are yet to be made: an entry written meanwhile makes them stale, never wrong."""
    last, owner = state.attempts[-1].started if state.attempts else None, state.open_attempt
    attempt, claim_id = (last.attempt, last.claim_id) if last else (0, "")
    size = step_log.step_log_bytes(store, run_log.run_prefix(run_id), attempt, claim_id) if with_steps else None
    return RunStamp(
        run_id=run_id,
        seq=head.entry.seq,
        entry_sha256=head.sha256,
        latest_attempt=attempt,
        claim_id=claim_id,
        steps_bytes=size,
        owner=owner.started.placement if owner else None,
    )


def is_current(store: object_store.ObjectStore, stamp: RunStamp) -> bool:
    """Whether the run's log still ends with the stamp's entry; at most three small requests, whatever its length."""
    prefix, steps_bytes = run_log.run_prefix(stamp.run_id), stamp.steps_bytes
    attempt = stamp.latest_attempt, stamp.claim_id
    with suppress(StorageError):
        return (
            codec.sha256(store.read(f"{prefix}/log/{log_entry.entry_name(stamp.seq)}")) == stamp.entry_sha256
            and store.size(f"{prefix}/log/{log_entry.entry_name(stamp.seq + 1)}") is None
            and (steps_bytes is None or step_log.step_log_bytes(store, prefix, *attempt) == steps_bytes)
        )
    return False


def arrow_table(columns: Sequence[Column], rows: Sequence[Any]) -> "pa.Table":
    """Return the rows as an Arrow table, an empty one of the same types if there are none."""
    import pyarrow as pa

    types = {
        "VARCHAR": pa.string(),
        "BIGINT": pa.int64(),
        "DOUBLE": pa.float64(),
        "BOOLEAN": pa.bool_(),
        "TIMESTAMP WITH TIME ZONE": pa.timestamp("us", tz="UTC"),
        "JSON": pa.dictionary(pa.int32(), pa.string()),
        "VARCHAR[]": pa.list_(pa.string()),
        "BIGINT[]": pa.list_(pa.int64()),
        "MAP(VARCHAR, DOUBLE)": pa.map_(pa.string(), pa.float64()),
        "MAP(VARCHAR, BIGINT)": pa.map_(pa.string(), pa.int64()),
        "MAP(VARCHAR, VARCHAR)": pa.map_(pa.string(), pa.string()),
    }
    arrays = []
    for column in columns:
        values = [getattr(row, column.name) for row in rows]
        if column.type.startswith("MAP"):
            values = [None if value is None else sorted(value.items()) for value in values]
        if column.type == "JSON":  # the attempts of a run repeat its configuration
            arrays.append(pa.array(values, pa.string()).dictionary_encode())
        else:
            arrays.append(pa.array(values, types[column.type]))
    return pa.Table.from_arrays(arrays, names=[column.name for column in columns])


def join_rows(columns: Sequence[Column], before: Path | None, kept: Collection[str], made: Sequence[Any]) -> "pa.Table":
    """Return the rows of one table: those of the runs in `kept` from its file, and those that were made anew."""
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    parts = [arrow_table(columns, made)]
    if before and kept:
        found = parquet.read_table(before, partitioning=None)
        parts.insert(0, found.filter(compute.is_in(found["run_id"], pa.array(sorted(kept)))))
    return pa.concat_tables(parts).unify_dictionaries()
