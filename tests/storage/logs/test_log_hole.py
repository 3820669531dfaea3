"""An entry that is missing before the newest is not the end of the log: nothing is written there, and it is named."""

from collections.abc import Callable

import pytest

from cairn.storage.errors import IntegrityError
from cairn.storage.logs import fold_cache
from cairn.storage.logs import run_log as run_log_module
from cairn.storage.logs.log_entry import entry_name
from cairn.storage.logs.registry import Registry, RolledBack
from cairn.storage.stores.object_store import ObjectStore
from tests.memory_store import MemoryStore
from tests.storage.builders import (
    LOG,
    check_invariants,
    claim,
    copy_objects,
    entry_log,
    open_run,
    run_log,
    run_with_commits,
)
from tests.storage.faulty_store import FaultyStore

ENTRIES = 7
MODELS = "models/champion/log"


def key_of(seq: int, log: str = LOG) -> str:
    return f"{log}/{entry_name(seq)}"


@pytest.fixture
def whole() -> MemoryStore:
    """A run of seven entries: opened, claimed, five commits."""
    made = MemoryStore("whole")
    run_with_commits(made, *range(1, ENTRIES - 1))
    return made


@pytest.fixture
def copied(store: ObjectStore, whole: MemoryStore) -> Callable[..., ObjectStore]:
    """Copy the run without some entries, as a copy does that is under way."""

    def copy(*missing: int) -> ObjectStore:
        copy_objects(whole, store)
        for seq in missing:
            store.delete(key_of(seq))
        return store

    return copy


@pytest.mark.unsound_log
@pytest.mark.parametrize("seq", range(ENTRIES - 1))
def test_an_entry_that_is_missing_is_named_and_nothing_is_written(copied: Callable[..., ObjectStore], seq: int) -> None:
    store = copied(seq)
    there = store.keys("runs")
    for act in (open_run, lambda store: claim(run_log(store))):
        with pytest.raises(IntegrityError, match=rf"{entry_name(seq)}: seq {seq} is missing, and seq {ENTRIES - 1} is"):
            act(store)
    assert store.keys("runs") == there


@pytest.mark.parametrize("seq", range(ENTRIES - 1))
def test_a_log_goes_on_once_the_missing_entry_is_back(
    copied: Callable[..., ObjectStore], whole: MemoryStore, seq: int
) -> None:
    store = copied(seq)
    log = run_log(store)
    with pytest.raises(IntegrityError):
        claim(log)
    assert store.create(key_of(seq), whole.read(key_of(seq)))
    claim(log)
    assert len(check_invariants(store, set()).attempts) == 2


def test_a_hole_is_found_by_a_process_that_begins_at_the_cached_fold(
    whole: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log_module, "FOLD_EVERY_ENTRIES", 4)
    made = MemoryStore("cached")
    run_with_commits(made, *range(1, ENTRIES - 1))
    assert made.size("runs/r1/fold.json") is not None
    made.delete(key_of(ENTRIES - 2))
    with pytest.raises(IntegrityError, match=f"seq {ENTRIES - 2} is missing"):
        claim(run_log(made))


def cached_with_a_hole(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """A run whose newest entry is the cached one; an older entry is missing."""
    monkeypatch.setattr(run_log_module, "FOLD_EVERY_ENTRIES", 1)
    monkeypatch.setattr(fold_cache, "PART_ITEMS", 2)
    made = MemoryStore("cached")
    log = open_run(made)
    for _ in range(9):
        claim(log)
    made.delete(key_of(3))
    return made


def test_a_run_goes_on_over_a_hole_that_its_cached_fold_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = cached_with_a_hole(monkeypatch)
    assert claim(run_log(store)) == 10
    assert store.size(key_of(3)) is None


def test_a_reader_of_every_entry_names_the_hole_that_the_cached_fold_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    log = run_log(cached_with_a_hole(monkeypatch))
    log.refresh()
    with pytest.raises(IntegrityError, match="seq 3 is missing"):
        log.read_entries()


def test_a_part_of_the_fold_that_is_lost_is_not_made_again_of_the_entries_before_a_hole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = cached_with_a_hole(monkeypatch)
    for key in store.keys("runs/r1/fold"):
        store.delete(key)
    state = run_log(store).refresh()
    with pytest.raises(IntegrityError, match="seq 3 is missing"):
        list(state.attempts)


def test_a_missing_entry_that_the_fold_was_cached_at_is_a_hole_and_no_loss_to_accept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = cached_with_a_hole(monkeypatch)
    cached, newest = store.read("runs/r1/fold.json"), len(store.keys(LOG))
    claim(run_log(store))
    store.write("runs/r1/fold.json", cached)
    store.delete(key_of(newest))
    with pytest.raises(IntegrityError, match=f"seq {newest} is missing, and seq {newest + 2} is there"):
        run_log(store).refresh()


@pytest.mark.unsound_log
@pytest.mark.parametrize("seq", range(3))
def test_a_missing_decision_of_a_registry_is_named_and_nothing_is_written(store: ObjectStore, seq: int) -> None:
    decision = RolledBack(alias="champion", manifest_sha256=None, by="me", why="")
    for _ in range(4):
        Registry(store, "champion").append(lambda state: decision)
    store.delete(key_of(seq, MODELS))
    there = store.keys("models")
    with pytest.raises(IntegrityError, match=rf"{entry_name(seq)}: seq {seq} is missing, and seq 3 is there"):
        Registry(store, "champion").append(lambda state: decision)
    assert store.keys("models") == there


def test_the_newest_name_is_asked_for_once_a_process_and_log(store: ObjectStore) -> None:
    run_with_commits(store, 1)
    counting = FaultyStore(store)
    log = run_log(counting)  # type: ignore[arg-type]
    for _ in range(3):
        claim(log)
    assert counting.operations.count("first") == 1


def test_a_reader_does_not_ask_for_the_newest_name(store: ObjectStore) -> None:
    run_with_commits(store, 1)
    counting = FaultyStore(store)
    run_log(counting).refresh()  # type: ignore[arg-type]
    assert "first" not in counting.operations


def test_an_entry_that_is_appended_while_the_newest_name_is_asked_for_is_no_hole(store: ObjectStore) -> None:
    """The name is asked for first, so every entry before it is there when the log is read."""
    log, rival = open_run(store), run_log(store)

    class Raced(FaultyStore):
        def first(self, prefix: str) -> str | None:
            claim(rival)
            return store.first(prefix)

    late = run_log(Raced(store))  # type: ignore[arg-type]
    late.refresh()
    assert claim(late) == 2
    assert log.refresh().latest_attempt == 2


def test_an_empty_log_has_no_newest_entry(store: ObjectStore) -> None:
    assert entry_log(store).newest_seq() == -1
