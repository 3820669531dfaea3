"""Packs are a cache: whatever becomes of them, the rows are those of the logs."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from cairn.reports.queries.run_query import answer_query
from cairn.reports.queries.run_tables import columns, make_log_rows, schema_digest
from cairn.storage.errors import StoreRefused
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.run_index import list_run_ids
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.codec import decode, encode
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.tables.table_cache import PACK, GatheredTables, TableCache, TableKind
from tests.entries import ended, opened, started
from tests.memory_store import MemoryStore

RUNS = ("r1", "r2", "r3")


class Folding:
    """Makes rows and remembers of which runs."""

    def __init__(self) -> None:
        self.run_ids: list[str] = []

    def __call__(self, run_id: str, state: RunState) -> Mapping[str, Sequence[Any]]:
        self.run_ids.append(run_id)
        return make_log_rows(run_id, state, "opened")


class ReadOnly(MemoryStore):
    """A store of which somebody may only read."""

    def write(self, key: str, data: bytes) -> None:
        raise StoreRefused(f"{key}: read-only")


def go_on(store: ObjectStore, run_id: str) -> None:
    """Append to a run: open it, or start and end an attempt."""
    log, writer = RunLog(store, run_id), Writer(host="here", pid=1)
    if log.refresh().opened is None:
        log.append(lambda state: opened(run_id), writer=writer)
    log.append(lambda state: started(state.latest_attempt + 1), writer=writer)
    log.append(lambda state: ended(state.latest_attempt), writer=writer)


def fill(store: ObjectStore) -> ObjectStore:
    for run_id in RUNS:
        go_on(store, run_id)
    return store


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    """The runs in a folder."""
    store = LocalStore(tmp_path / "store")
    fill(store)
    return store


def remove(store: ObjectStore, run_id: str) -> None:
    for key in store.keys(f"runs/{run_id}"):
        store.delete(key)


def gather(store: ObjectStore, folder: Path, *, packs: int = 32) -> tuple[GatheredTables, list[str]]:
    """Return what a reader gathers, and the runs it had to fold."""
    folding = Folding()
    tables = {table: columns(table) for table in ("runs", "training_attempts")}
    kind = TableKind(name="log", version=schema_digest(), tables=tables, make=folding, packs=packs)
    cache = TableCache(store, folder / "packs")
    return cache.gather(kind, list_run_ids(store), list(tables)), folding.run_ids


def rows(found: GatheredTables, table: str = "training_attempts") -> list[tuple[str, int]]:
    """Return run and number (of attempts) of every row."""
    column = "attempts" if table == "runs" else "attempt"
    names = ["run_id", column]
    tables = [
        parquet.read_table(part, partitioning=None, columns=names) if isinstance(part, Path) else part
        for part in found.parts[table]
    ]
    return sorted((row["run_id"], row[column]) for table in tables for row in table.to_pylist())


def files(found: GatheredTables) -> set[Path]:
    return {part for parts in found.parts.values() for part in parts if isinstance(part, Path)}


def test_what_was_packed_is_not_folded_again(store: ObjectStore, tmp_path: Path) -> None:
    first, folded = gather(fill(store), tmp_path)
    again, folded_again = gather(store, tmp_path)
    assert (sorted(folded), folded_again) == (list(RUNS), [])
    assert rows(first) == rows(again) == [(run_id, 1) for run_id in RUNS]


def test_a_run_that_went_on_is_folded_and_its_old_rows_are_left_out(store: ObjectStore, tmp_path: Path) -> None:
    gather(fill(store), tmp_path)
    go_on(store, "r2")
    found, folded = gather(store, tmp_path)
    assert folded == ["r2"]
    assert rows(found) == [("r1", 1), ("r2", 1), ("r2", 2), ("r3", 1)]
    assert rows(found, "runs") == [("r1", 1), ("r2", 2), ("r3", 1)]
    assert gather(store, tmp_path)[1] == []


def test_a_run_of_the_same_name_and_length_is_another_run(local: LocalStore, tmp_path: Path) -> None:
    gather(local, tmp_path)
    remove(local, "r1")
    go_on(local, "r1")
    assert gather(local, tmp_path)[1] == ["r1"]


def test_a_run_that_was_removed_is_no_row(local: LocalStore, tmp_path: Path) -> None:
    gather(local, tmp_path)
    remove(local, "r1")
    assert rows(gather(local, tmp_path)[0], "runs") == [("r2", 1), ("r3", 1)]


def index_of(packs: Path) -> Path:
    return next(packs.glob(f"log/*/{PACK}"))


def file_of(packs: Path) -> Path:
    return next(packs.glob("log/*/training_attempts-*.parquet"))


def cut_end(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:-size])


def name_an_older_version(packs: Path) -> None:
    document = decode(index_of(packs).read_bytes(), dict, where="the index")
    index_of(packs).write_bytes(encode({**document, "version": "0" * 64}))


def flip_a_byte_of_a_file(packs: Path) -> None:
    data = bytearray(file_of(packs).read_bytes())
    data[len(data) // 2] ^= 1
    file_of(packs).write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no index": lambda packs: index_of(packs).unlink(),
    "a torn index": lambda packs: cut_end(index_of(packs), 20),
    "nonsense as the index": lambda packs: index_of(packs).write_bytes(b'{"version": 1}'),
    "an index of an older version": name_an_older_version,
    "no file": lambda packs: file_of(packs).unlink(),
    "a torn file": lambda packs: cut_end(file_of(packs), 8),
    "a flipped byte of a file": flip_a_byte_of_a_file,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_costs_time_and_changes_nothing(
    local: LocalStore, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    expected = rows(gather(local, tmp_path, packs=1)[0])
    damage(tmp_path / "packs")
    found, folded = gather(local, tmp_path, packs=1)
    assert (rows(found), sorted(folded)) == (expected, list(RUNS))
    assert gather(local, tmp_path, packs=1)[1] == [], "what was damaged is made again"


def test_two_writers_at_once_cost_time_and_change_nothing(local: LocalStore, tmp_path: Path) -> None:
    for _ in range(2):
        go_on(local, "r3")
        with ThreadPoolExecutor(4) as readers:
            found = list(readers.map(lambda n: gather(local, tmp_path / str(n))[0], range(4)))
        assert len({tuple(rows(each, "runs")) for each in found}) == 1
    assert rows(gather(local, tmp_path)[0], "runs")[-1] == ("r3", 3)


def test_a_store_is_only_read(tmp_path: Path) -> None:
    inner = fill(MemoryStore("inner"))
    store = ReadOnly("inner")
    store._objects = inner._objects  # type: ignore[attr-defined]
    first, _ = gather(store, tmp_path)
    again, folded = gather(store, tmp_path)
    assert folded == [] and rows(first) == rows(again)


def test_where_nothing_may_be_written_the_rows_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "packs").write_text("a file where a folder should be")
    assert rows(gather(fill(MemoryStore("inner")), tmp_path)[0]) == [(run_id, 1) for run_id in RUNS]


def test_a_run_that_moved_costs_no_other_pack_a_write(local: LocalStore, tmp_path: Path) -> None:
    before = files(gather(local, tmp_path)[0])
    go_on(local, "r2")
    after = files(gather(local, tmp_path)[0])
    assert len(before) == 6 and len(before & after) == 4, "two tables of each run, which lie in packs of their own"


def test_files_nobody_names_any_more_are_deleted(local: LocalStore, tmp_path: Path) -> None:
    for _ in range(3):
        fill(local)
        gather(local, tmp_path)
    assert len(list((tmp_path / "packs").rglob("*.parquet"))) == 6
    remove(local, "r1")
    gather(local, tmp_path)
    assert len(list((tmp_path / "packs").rglob("*.parquet"))) == 4


@pytest.mark.unsound_log
def test_a_log_that_cannot_be_believed_is_named_and_never_packed(local: LocalStore, tmp_path: Path) -> None:
    key = local.keys("runs/r2/log")[-1]
    local.write(key, local.read(key).replace(b"here", b"gone"))
    for _ in range(2):
        found, _ = gather(local, tmp_path)
        assert list(found.unreadable) == ["r2"]
        assert rows(found, "runs") == [("r1", 1), ("r3", 1)]


def test_every_table_of_a_store_of_every_kind_can_be_asked(store: ObjectStore, tmp_path: Path) -> None:
    sql = """select r.run_id, count(*) as attempts, (select count(*) from steps) as steps,
        (select count(*) from promotions) + (select count(*) from checkpoints)
            + (select count(*) from evaluations) as more
        from runs r join training_attempts using (run_id) where ended_at <= now() group by all order by all"""
    fill(store)
    for _ in range(2):
        with answer_query(store, sql, work=tmp_path) as found:
            assert list(found.rows) == [(run_id, 1, 0, 0) for run_id in RUNS]
