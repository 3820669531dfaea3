"""A run with 2,000 entries and 400 checkpoints answers in a bounded number of requests."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cairn.reports.queries.run_lookup import find_run
from cairn.reports.queries.run_status import list_runs, read_status
from cairn.storage.logs.log_entry import Entry, EntryLog, entry_name
from cairn.storage.logs.run_entries import RUN_KINDS, CheckpointDeleted, CheckpointSuperseded, EvaluationRecorded
from cairn.storage.logs.run_log import FOLD_EVERY_ENTRIES, fold
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.codec import encode, sha256
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import MAX_READ_BYTES, ObjectStore
from tests.entries import ended, evaluated, started, writer
from tests.memory_store import MemoryStore
from tests.storage.builders import LOG, RUN, committed, entry, newest_entry, opened, run_log
from tests.storage.faulty_store import FaultyStore

pytestmark = pytest.mark.xdist_group("cold-start")  # its runs are made once for all its tests

ENTRIES, CHECKPOINTS, KEPT = 2_000, 400, 3
NEWEST = CHECKPOINTS * 10


def history() -> Iterator[tuple[object, int | None]]:
    """Yield bodies and their attempts: 200 attempts that commit, are evaluated, and leave old ones to retention."""
    yield opened(), None
    attempt = 0
    for number in range(1, CHECKPOINTS + 1):
        if number % 2 == 1:
            if attempt:
                yield ended(attempt, "preempted"), attempt
            attempt += 1
            yield started(attempt), None
        yield committed(number * 10, attempt), attempt
        yield evaluated(number * 10, 9.0 - number / 1000), None
        if number > KEPT:
            old = committed((number - KEPT) * 10, (number - KEPT + 1) // 2)
            named = {"step": old.step, "attempt": old.attempt, "prefix": old.prefix}
            yield CheckpointSuperseded(**named, manifest_sha256=old.manifest_sha256, why="not among the newest"), None
            yield CheckpointDeleted(**named, manifest_sha256=old.manifest_sha256, bytes=1), None
    yield ended(attempt, "preempted"), attempt


def forge_history(store: ObjectStore) -> int:
    """Write the log as its writers would have; returns the number of entries."""
    state, prev, seq = RunState(), None, 0
    for seq, (body, attempt) in enumerate(history()):
        written: Entry = entry(body, attempt=attempt, seq=seq)
        state = fold([written], state)
        data = encode(replace(written, prev=prev, resume=state.resume))
        store.write(f"{LOG}/{entry_name(seq)}", data)
        prev = sha256(data)
    return seq + 1


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """The long log on local files; its fold was cached by a writer some entries before the end."""
    store = LocalStore(tmp_path_factory.mktemp("long") / "store")
    forge_history(store)
    log = run_log(store)
    for number in range(FOLD_EVERY_ENTRIES):
        log.append(partial(evaluation, number), writer=writer())
    assert log.seq >= ENTRIES
    assert len(log.state.checkpoints) == CHECKPOINTS
    return store


def evaluation(number: int, state: RunState) -> EvaluationRecorded:
    return evaluated(NEWEST, 7.0 + number)


def requests_of(store: ObjectStore, read: Callable[[ObjectStore], object]) -> int:
    counting = FaultyStore(store)
    read(counting)  # type: ignore[arg-type]
    return len(counting.operations)


def test_the_newest_committed_checkpoint_is_found_in_two_requests(long_run: LocalStore) -> None:
    def newest(store: ObjectStore) -> None:
        found = newest_entry(EntryLog(store=store, prefix=LOG, kinds=RUN_KINDS))
        assert found is not None
        assert [reference.step for reference in found.entry.resume] == [NEWEST, NEWEST - 10, NEWEST - 20]

    assert requests_of(long_run, newest) == 2


def test_status_needs_a_bounded_number_of_requests(long_run: LocalStore) -> None:
    def status(store: ObjectStore) -> None:
        assert read_status(find_run(store, RUN)).newest_committed_step == NEWEST

    assert requests_of(long_run, status) <= FOLD_EVERY_ENTRIES + 4


def test_the_list_of_runs_needs_a_bounded_number_of_requests(long_run: LocalStore) -> None:
    assert requests_of(long_run, list_runs) <= FOLD_EVERY_ENTRIES + 6


def test_without_its_cache_the_long_log_gives_the_same_status(long_run: LocalStore, tmp_path: Path) -> None:
    bare = shutil.copytree(long_run.local_path("runs"), tmp_path / "runs", copy_function=os.link)
    (bare / RUN / "fold.json").unlink()
    assert run_log(LocalStore(tmp_path)).refresh() == run_log(long_run).refresh()


def test_a_reader_far_behind_reads_ahead_in_one_listing(long_run: LocalStore) -> None:
    class Far(MemoryStore):
        """Shares the entries, without files behind them."""

        def read(self, key: str, *, at_most_bytes: int = MAX_READ_BYTES) -> bytes:
            return long_run.read(key, at_most_bytes=at_most_bytes)

        def first(self, prefix: str) -> str | None:
            return long_run.first(prefix)

    counting = FaultyStore(Far())
    entries = list(EntryLog(store=counting, prefix=LOG, kinds=RUN_KINDS).read_after(None))  # type: ignore[arg-type]
    assert [read.entry.seq for read in entries] == list(range(len(entries)))
    assert len(counting.operations) <= len(entries) + 4
