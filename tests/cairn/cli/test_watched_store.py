"""A look over many runs asks for those that may need something; what the index of runs says is never acted on alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.flows.watching.run_watcher import RunWatcher, WatcherMemory, WatchRow
from cairn.storage.logs import log_entry, run_index
from cairn.storage.logs.log_entry import entry_name
from cairn.storage.logs.run_index import INDEX_FOLDER, RunIndex
from cairn.storage.stores.object_store import ObjectStore
from tests.cairn.recorded_starts import Recorded
from tests.fabricated_run import FabricatedRun, fabricate, promote
from tests.memory_store import MemoryStore
from tests.storage.faulty_store import FaultyStore

Look = Callable[..., dict[str, WatchRow]]
RUNS, OPEN = 1_000, 100
INDEX_KEY = f"{INDEX_FOLDER}/00000.json"


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Look once at a store, in a process of its own as far as memory goes; a copied log may bear another's name."""
    monkeypatch.setattr(log_entry, "check_place", lambda log, name, told: None)

    def look(store: ObjectStore, recorded: Recorded | None = None, *, now: float = 1000.0) -> dict[str, WatchRow]:
        memory = WatcherMemory(tmp_path / "observations.json", monotonic=lambda: now)
        watcher = RunWatcher(store, recorded or Recorded(), memory, lambda seconds: None)
        return {row.run_id: row for row in watcher.poll()}

    return look


def finished_run(store: ObjectStore, run_id: str) -> FabricatedRun:
    run = fabricate(store, run_id)
    run.start()
    reference = run.complete()
    run.evaluate(reference, loss=2.0)
    promote(store, run_id, reference, loss=2.0, alias="champion")
    return run


def many_runs() -> MemoryStore:
    """A thousand runs, of which a hundred have an owner on another host: copies of the log of one of each kind."""
    store = MemoryStore("many")
    finished_run(store, "over")
    fabricate(store, "open").start()
    for template, count in (("over", RUNS - OPEN), ("open", OPEN)):
        objects = {key: store.read(key) for key in store.keys(f"runs/{template}/log")}
        for number in range(1, count):
            for key, data in objects.items():
                store.write(key.replace(f"runs/{template}/", f"runs/{template}-{number:03d}/"), data)
    return store


def test_a_look_over_a_thousand_runs_with_a_hundred_open_needs_three_hundred_requests(look: Look) -> None:
    store = many_runs()
    first = look(store)
    counting = FaultyStore(store)
    assert look(counting) == first
    assert len(first) == RUNS
    assert len(counting.operations) <= 300


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("watched")


def test_a_run_that_moved_is_seen_as_it_is(store: MemoryStore, look: Look) -> None:
    run = fabricate(store, "run")
    run.start()
    look(store)
    run.end("error", action="stop")
    assert "a person decides" in look(store)["run"].why


def test_a_run_that_was_over_and_goes_on_is_noticed(
    store: MemoryStore, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "ASKED_OVER_RUNS", 2)
    runs = {f"run-{number}": finished_run(store, f"run-{number}") for number in range(6)}
    look(store)
    runs["run-3"].start()
    seen = [look(store)["run-3"].why for _ in range(3)]
    assert "attempt 2" in seen[-1]


def test_nothing_is_continued_on_the_word_of_a_stale_index(store: MemoryStore, look: Look) -> None:
    run, recorded = fabricate(store, "run"), Recorded()
    run.start()
    look(store)
    stale = store.read(INDEX_KEY)
    run.end("error", action="stop")
    ended = store.read(newest := f"runs/run/log/{entry_name(run.log.seq)}")
    store.delete(newest)  # as a store does that shows an entry late
    real, store.read = store.read, late(store, newest, ended)  # type: ignore[method-assign]
    store.write(INDEX_KEY, stale)
    assert look(store, recorded, now=9000.0)["run"].action == "left"
    store.read = real  # type: ignore[method-assign]
    assert recorded.begun == []


def late(store: MemoryStore, key: str, data: bytes) -> Callable[..., bytes]:
    """Return a read that shows the object although the store does not list it."""
    read = store.read
    return lambda asked, **limits: data if asked == key else read(asked, **limits)


def test_without_its_index_a_look_says_the_same(store: MemoryStore, look: Look) -> None:
    finished_run(store, "over")
    fabricate(store, "open").start()
    rows = look(store)
    assert look(store) == rows
    store.write(INDEX_KEY, b"garbage")
    assert look(store) == rows
    store.delete(INDEX_KEY)
    assert look(store) == rows


def test_a_run_that_was_deleted_is_forgotten(store: MemoryStore, look: Look) -> None:
    finished_run(store, "over")
    look(store)
    for key in store.keys("runs/over"):
        store.delete(key)
    assert look(store) == {}
    assert RunIndex(store).refresh() == []


def test_a_run_that_was_opened_anew_under_its_name_is_seen_as_it_is(store: MemoryStore, look: Look) -> None:
    run = fabricate(store, "run")
    run.start()
    run.commit(10)
    run.end("error", action="stop")
    look(store)
    for key in store.keys("runs/run"):
        store.delete(key)
    fabricate(store, "run").start()
    assert "attempt 1" in look(store)["run"].why


def test_an_index_of_many_objects_is_read_whole_and_shrinks(
    store: MemoryStore, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "RUNS_IN_OBJECT", 2)
    for number in range(5):
        fabricate(store, f"run-{number}").start()
    look(store)
    assert len(store.keys(INDEX_FOLDER)) == 3
    counting = FaultyStore(store)
    look(counting)
    assert len([item for item in counting.operations if item != "local_path"]) < 5 * 2 + 3 * 2 + 3
    for key in [key for number in range(3) for key in store.keys(f"runs/run-{number}")]:
        store.delete(key)
    look(store)
    assert len(store.keys(INDEX_FOLDER)) == 1
