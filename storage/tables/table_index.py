"""A pack: the rows of some runs, a Parquet file for each table, and the entry of each run at which they were made."""

import os
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from storage.errors import IntegrityError, StorageError
from storage.logs.fold_cache import FoldedLog
from storage.logs.log_entry import entry_name
from storage.logs.run_entries import Placement
from storage.logs.run_state import RunState
from storage.logs.step_log import step_log_bytes
from storage.stores.document import decode, encode, project, sha256
from storage.stores.object_store import ObjectStore
from storage.stores.verified_object import WrittenObject, describe_file

PACK = "pack.json"


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
    steps_bytes: int | None
    owner: Placement | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTable:
    """One table of a pack: a Parquet file named by its SHA-256."""

    table: str
    bytes: int
    sha256: str

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


def read_pack(folder: Path, version: str) -> Pack | None:
    """Return the pack in the folder, None if it is missing, damaged or of another version."""
    with suppress(OSError, IntegrityError):
        pack = decode((folder / PACK).read_bytes(), Pack, where=str(folder))
        return pack if pack.version == version else None
    return None


def write_pack(folder: Path, pack: Pack) -> None:
    """Make this the folder's pack and delete the files of others; of two writers the last one wins."""
    temporary = folder / f".{uuid.uuid4().hex}"
    temporary.write_bytes(encode(pack))
    os.replace(temporary, folder / PACK)
    for name in set(os.listdir(folder)) - {PACK, *(packed.file_name for packed in pack.tables)}:
        (folder / name).unlink(missing_ok=True)


def find_files(folder: Path, pack: Pack, tables: Collection[str]) -> Mapping[str, Path] | None:
    """Return the files of these tables, None if one is missing or damaged."""
    packed = {folder / item.file_name: item for item in pack.tables if item.table in tables}
    with suppress(OSError):
        if all(project(item, WrittenObject) == describe_file(path) for path, item in packed.items()):
            return {item.table: path for path, item in packed.items()}
    return None


def stamp_run(
    store: ObjectStore, run_prefix: str, run_id: str, folded: FoldedLog[RunState], *, with_steps: bool
) -> RunStamp:
    """Return the stamp of rows that are yet to be made: an entry written meanwhile makes them stale, never wrong."""
    attempt, owner = folded.state.latest_attempt, folded.state.open_attempt
    return RunStamp(
        run_id=run_id,
        seq=folded.head.entry.seq,
        entry_sha256=folded.head.sha256,
        latest_attempt=attempt,
        steps_bytes=step_log_bytes(store, run_prefix, attempt) if with_steps else None,
        owner=owner.started.placement if owner else None,
    )


def is_current(store: ObjectStore, run_prefix: str, stamp: RunStamp) -> bool:
    """Whether the run's log still ends with the stamp's entry; at most three small requests, whatever its length."""
    folder, steps_bytes = f"{run_prefix}/log", stamp.steps_bytes
    with suppress(StorageError):
        return (
            sha256(store.read(f"{folder}/{entry_name(stamp.seq)}")) == stamp.entry_sha256
            and store.size(f"{folder}/{entry_name(stamp.seq + 1)}") is None
            and (steps_bytes is None or step_log_bytes(store, run_prefix, stamp.latest_attempt) == steps_bytes)
        )
    return False
