"""A run of any length opens in a bounded number of requests; its past is read on request and is never lost."""

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cairn.reports.queries.run_lookup import find_run
from cairn.reports.queries.run_status import list_runs, read_status
from cairn.storage.checkpoints.resume_point import newest_verified
from cairn.storage.logs import fold_cache
from cairn.storage.logs import run_log as run_log_module
from cairn.storage.logs.log_entry import EntryLog
from cairn.storage.logs.run_entries import RUN_KINDS, CheckpointDeleted, CheckpointSuperseded, EvaluationRecorded
from cairn.storage.logs.run_log import RunLog, fold
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.object_store import MAX_READ_BYTES, ObjectStore
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.settings import CheckpointConfig
from tests.entries import ended, evaluated, started, writer
from tests.memory_store import MemoryStore
from tests.storage.builders import LOG, RUN, claim, commit, committed, copy_objects, open_run, run_log, stage
from tests.storage.faulty_store import FaultyStore
from tests.text.shakespeare import TINY_SHAKESPEARE

pytestmark = pytest.mark.xdist_group("long-history")  # its run is made once for all its tests

COMMITS, FOLD_EVERY, PART = 400, 32, 16
PARTS = f"runs/{RUN}/fold/"


def append(log: RunLog, body: object, attempt: int | None = None) -> None:
    log.append(lambda state: body, writer=writer(attempt))


def live_through(log: RunLog) -> None:
    """Commit, evaluate, supersede and delete, over and over, in an attempt for every fifty commits."""
    for number in range(1, COMMITS + 1):
        if number % 50 == 1:
            if log.state.attempts:
                append(log, ended(log.state.latest_attempt, "preempted"))
            append(log, started(log.state.latest_attempt + 1))
        attempt = log.state.latest_attempt
        append(log, committed(number * 10, attempt), attempt)
        append(log, evaluated(number * 10, 9.0 - number / 1000))
        if number % 200 and len(log.state.readable) > 3:
            old = asdict(log.state.readable[3].committed.reference)
            append(log, CheckpointSuperseded(**old, why="not among the newest"))
            append(log, CheckpointDeleted(**old, bytes=1))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_cache, "PART_ITEMS", PART)
    monkeypatch.setattr(run_log_module, "FOLD_EVERY_ENTRIES", FOLD_EVERY)


@pytest.fixture(scope="module")
def lived() -> Iterator[tuple[MemoryStore, list[str]]]:
    """The store of the long run, and every key that was written as a cache."""
    written = list[str]()

    class Noting(MemoryStore):
        def write(self, key: str, data: bytes) -> None:
            written.append(key)
            super().write(key, data)

    store = Noting("long")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_cache, "PART_ITEMS", PART)
        patch.setattr(run_log_module, "FOLD_EVERY_ENTRIES", FOLD_EVERY)
        live_through(open_run(store))
        yield store, written


@pytest.fixture
def store(lived: tuple[MemoryStore, list[str]]) -> MemoryStore:
    """A copy of the long run's store."""
    copy = MemoryStore("copy")
    copy_objects(lived[0], copy)
    return copy


def from_entries(store: ObjectStore) -> RunState:
    return fold(run_log(store).read_entries())


def test_a_long_log_opens_in_a_bounded_number_of_requests(store: MemoryStore) -> None:
    counting = FaultyStore(store)
    state = run_log(counting).refresh()  # type: ignore[arg-type]
    assert state.commits == COMMITS
    assert len(counting.operations) <= FOLD_EVERY + 4


@pytest.mark.parametrize("read", [lambda store: read_status(find_run(store, RUN)), list_runs], ids=["status", "runs"])
def test_the_verbs_that_read_a_long_run_need_a_bounded_number_of_requests(
    store: MemoryStore, read: Callable[[Any], object]
) -> None:
    counting = FaultyStore(store)
    assert str(COMMITS * 10) in str(read(counting))
    assert len(counting.operations) <= FOLD_EVERY + 6


def test_a_reader_far_behind_reads_ahead_in_one_listing(store: MemoryStore) -> None:
    counting: Any = FaultyStore(store)
    entries = list(EntryLog(store=counting, prefix=LOG, kinds=RUN_KINDS).read_after(None))
    assert [read.entry.seq for read in entries] == list(range(len(entries)))
    assert len(counting.operations) <= len(entries) + 4


def test_the_head_of_the_cache_does_not_grow_with_the_log(store: MemoryStore) -> None:
    names = len(store.keys(PARTS[:-1])) * 80
    assert (store.size(f"runs/{RUN}/fold.json") or 0) < names + PART * 2 * 12_000


def test_every_part_of_the_cache_is_written_once(lived: tuple[MemoryStore, list[str]]) -> None:
    parts = [key for key in lived[1] if key.startswith(PARTS)]
    assert len(parts) == len(set(parts)) > COMMITS // PART


class Pastless(MemoryStore):
    """Fails the test that reads a part."""

    def read(self, key: str, *, at_most_bytes: int = MAX_READ_BYTES) -> bytes:
        assert not key.startswith(PARTS), f"{key} was read"
        return super().read(key, at_most_bytes=at_most_bytes)


def test_claim_commit_and_evaluation_read_nothing_of_the_past(lived: tuple[MemoryStore, list[str]]) -> None:
    store = Pastless()
    copy_objects(lived[0], store)
    log = run_log(store)
    attempt = claim(log)
    commit(log, stage(store, step=COMMITS * 10 + 5, attempt=attempt))
    append(log, evaluated(COMMITS * 10 + 5, 1.0))
    assert newest_verified(log, writer=writer()) == log.state.resume[0]


def test_a_sweep_of_a_run_that_does_not_stop_early_reads_nothing_of_the_past(
    lived: tuple[MemoryStore, list[str]],
) -> None:
    store = Pastless()
    copy_objects(lived[0], store)
    assert sweep_run(run_log(store), CheckpointConfig(keep_last=1, keep_best=0), "").items


def test_whoever_asks_for_the_past_gets_all_of_it(store: MemoryStore) -> None:
    state = run_log(store).refresh()
    assert [record.committed.step for record in state.checkpoints] == [number * 10 for number in range(1, COMMITS + 1)]
    assert [item.step for item in state.evaluations] == [number * 10 for number in range(1, COMMITS + 1)]
    assert state == from_entries(store)


@pytest.mark.parametrize("damage", [b"", b"[]", b"\0"], ids=["empty", "no items", "not json"])
def test_a_damaged_part_is_replaced_by_the_entries(store: MemoryStore, damage: bytes) -> None:
    for key in store.keys(PARTS[:-1])[::2]:
        store.write(key, damage)
    assert run_log(store).refresh() == from_entries(store)


def test_a_missing_part_is_written_again(store: MemoryStore) -> None:
    keys = store.keys(PARTS[:-1])
    for key in keys:
        store.delete(key)
    assert run_log(store).refresh() == from_entries(store)
    assert set(store.keys(PARTS[:-1])) >= set(keys)


def test_a_head_that_no_reader_would_take_is_not_written(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_cache, "MAX_DOCUMENT_BYTES", 1_000)
    before, log = store.read(f"runs/{RUN}/fold.json"), run_log(store)
    for number in range(2 * FOLD_EVERY):
        append(log, evaluated(COMMITS * 10, 7.0 + number))
    assert store.read(f"runs/{RUN}/fold.json") == before


def test_a_checkpoint_that_was_deleted_long_ago_is_not_committed_again(store: MemoryStore) -> None:
    log = run_log(store)
    attempt = log.refresh().latest_attempt
    old = log.state.attempt(attempt).started.attempt
    first = next(record.committed for record in log.state.checkpoints if record.committed.attempt == old)
    with pytest.raises(Exception, match="every reader would refuse"):
        append(log, first, attempt)


def traced_bytes(make: Callable[[], object]) -> int:
    """Return the memory that a value takes."""
    tracemalloc.start()
    try:
        kept = make()
        return tracemalloc.get_traced_memory()[0] if kept else 0
    finally:
        tracemalloc.stop()


def test_the_past_of_a_run_takes_a_fifth_of_the_memory_of_its_items() -> None:
    texts = Path(TINY_SHAKESPEARE).read_text(encoding="utf-8")

    def items() -> Iterator[EvaluationRecorded]:
        for number in range(1_000):
            item = replace(evaluated(number, 2.0), samples=(texts[number * 100 : number * 100 + 400],))
            yield msgspec.json.decode(msgspec.json.encode(item), type=EvaluationRecorded)

    assert 5 * traced_bytes(lambda: fold_cache.History(items())) < traced_bytes(lambda: tuple(items()))
    assert tuple(fold_cache.History(items())) == tuple(items())
