"""The index of packed tables, and the entry at which a run's rows were made; an unsound or older one is ignored."""

from dataclasses import dataclass

from storage.errors import StorageError
from storage.logs.fold_cache import FoldedLog
from storage.logs.log_entry import entry_name
from storage.logs.run_entries import Placement
from storage.logs.run_state import RunState
from storage.logs.step_log import step_log_bytes
from storage.stores.document import decode, encode, sha256
from storage.stores.object_store import ObjectStore


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
    """One table of a pack: a Parquet object named by its SHA-256."""

    table: str
    key: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """All tables of one kind for some runs."""

    tables: tuple[PackedTable, ...]
    runs: tuple[RunStamp, ...]
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    version: str
    packs_sha256: str
    packs: tuple[Pack, ...]


def read_index(store: ObjectStore, key: str, version: str) -> tuple[Pack, ...]:
    """Return the packs in the index, none if it is missing, damaged or of another version."""
    try:
        index = decode(store.read(key), _Index, where=key)
    except StorageError:
        return ()
    sound = index.version == version and index.packs_sha256 == sha256(encode(index.packs))
    return index.packs if sound else ()


def write_index(store: ObjectStore, key: str, version: str, packs: tuple[Pack, ...]) -> None:
    """Overwrite the index; of two writers the last one wins and the other's packs are made again."""
    store.write(key, encode(_Index(version=version, packs_sha256=sha256(encode(packs)), packs=packs)))


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
    folder = f"{run_prefix}/log"
    try:
        if sha256(store.read(f"{folder}/{entry_name(stamp.seq)}")) != stamp.entry_sha256:
            return False
        if store.size(f"{folder}/{entry_name(stamp.seq + 1)}") is not None:
            return False
        steps_bytes = stamp.steps_bytes
        return steps_bytes is None or step_log_bytes(store, run_prefix, stamp.latest_attempt) == steps_bytes
    except StorageError:
        return False
