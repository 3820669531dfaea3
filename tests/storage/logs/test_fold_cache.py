"""The cached fold makes a long log cheap to read, and is never believed where it could be wrong."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cairn.storage.errors import IntegrityError, StoreUnavailable
from cairn.storage.logs import run_log as run_log_module
from cairn.storage.logs.fold_cache import FOLD_VERSION
from cairn.storage.logs.log_entry import entry_name
from cairn.storage.logs.run_log import fold
from cairn.storage.logs.run_state import RunState
from cairn.storage.stores.object_store import ObjectStore
from tests.entries import ended, evaluated, noted, writer
from tests.memory_store import MemoryStore
from tests.storage.builders import LOG, claim, commit, copy_objects, open_run, run_log, stage

KEY = "runs/r1/fold.json"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache at every fourth entry, so that short logs have one."""
    monkeypatch.setattr(run_log_module, "FOLD_EVERY_ENTRIES", 4)


@pytest.fixture
def cached(store: ObjectStore, often: None) -> ObjectStore:
    """A run with every kind of state in it, cached before its last entries."""
    made = MemoryStore()
    log = open_run(made)
    for attempt, step in ((1, 5), (2, 10)):
        claim(log)
        commit(log, stage(made, step=step, attempt=attempt))
        log.append(lambda state, step=step: evaluated(step, 2.5), writer=writer())
        log.append(lambda state: noted(), writer=writer())
    copy_objects(made, store)
    assert store.size(KEY) is not None
    return store


def from_entries(store: ObjectStore) -> RunState:
    return fold(run_log(store).read_entries())


def test_a_reader_that_begins_at_the_cache_ends_at_the_state_the_entries_give(cached: ObjectStore) -> None:
    assert run_log(cached).refresh() == from_entries(cached)


def test_a_reader_that_begins_at_the_cache_appends_where_the_log_ends(cached: ObjectStore) -> None:
    log = run_log(cached)
    log.append(lambda state: ended(2), writer=writer(2))
    assert run_log(cached).refresh() == from_entries(cached)
    assert [entry.seq for entry in log.read_entries()] == list(range(log.seq + 1))


def test_without_the_cache_nothing_is_lost(cached: ObjectStore) -> None:
    before = run_log(cached).refresh()
    cached.delete(KEY)
    assert run_log(cached).refresh() == before


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "another step": lambda data: data.replace(b'"step": 5', b'"step": 4', 1),
    "torn": lambda data: data[: len(data) // 2],
    "a later version": lambda data: data.replace(
        b'"version": %d' % FOLD_VERSION, b'"version": %d' % (FOLD_VERSION + 1), 1
    ),
    "no JSON": lambda data: b"\0not json\n" + data,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_cache_is_ignored(cached: ObjectStore, damage: Callable[[bytes], bytes]) -> None:
    data = cached.read(KEY)
    assert damage(data) != data
    cached.write(KEY, damage(data))
    assert run_log(cached).refresh() == from_entries(cached)


def test_a_cache_of_another_log_is_ignored(cached: ObjectStore) -> None:
    other = MemoryStore()
    log = open_run(other)
    for _ in range(5):
        claim(log)
    cached.write(KEY, other.read(KEY))
    assert run_log(cached).refresh() == from_entries(cached)


def test_a_cache_whose_fold_disagrees_with_the_entrys_writer_is_ignored(cached: ObjectStore) -> None:
    log = run_log(cached)
    state, head = log.refresh(), log.head
    assert head is not None
    run_log(cached).write_fold(head, replace(state, live_checkpoints=state.live_checkpoints[:1]))
    assert run_log(cached).refresh() == state


def test_a_log_that_lost_its_end_is_not_appended_to(cached: ObjectStore) -> None:
    for seq in range(3, 20):
        cached.delete(f"{LOG}/{entry_name(seq)}")
    with pytest.raises(IntegrityError, match=r"entries were deleted; restore them, or delete runs/r1/fold\.json"):
        run_log(cached).refresh()


def test_a_cache_that_cannot_be_written_loses_no_append(often: None) -> None:
    class NoFold(MemoryStore):
        def write(self, key: str, data: bytes) -> None:
            if key == KEY:
                raise StoreUnavailable("no space")
            super().write(key, data)

    store = NoFold()
    log = open_run(store)
    for _ in range(6):
        claim(log)
    assert log.state.latest_attempt == 6
    assert from_entries(store) == log.state
