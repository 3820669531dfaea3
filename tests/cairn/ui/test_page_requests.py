"""What a page asks of the store, counted: each entry of a log and each heartbeat once, and nothing of other runs."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cairn.reports.pages.run_report import gather_report
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import MAX_READ_BYTES
from tests.cairn.live_server import served
from tests.fabricated_run import fabricate, store_bard
from tests.memory_store import MemoryStore


class CountedStore(MemoryStore):
    """A store, as far away as a bucket, that remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def read(self, key: str, *, at_most_bytes: int = MAX_READ_BYTES) -> bytes:
        self.asked.append(f"read {key}")
        return super().read(key, at_most_bytes=at_most_bytes)

    def size(self, key: str) -> int | None:
        self.asked.append(f"size {key}")
        return super().size(key)

    def keys(self, prefix: str) -> list[str]:
        self.asked.append(f"list {prefix}")
        return super().keys(prefix)


def counted(*names: str) -> CountedStore:
    """Return a store with these open runs, each with a checkpoint and a heartbeat."""
    store = CountedStore()
    for name in names:
        run = fabricate(store, name)
        run.start()
        run.commit(10)
        run.beat(11)
    store.asked.clear()
    return store


def asked_by(store: CountedStore, tmp_path: Path, *paths: str) -> Counter[str]:
    """Return what the last of these pages asks of the store, and how often."""
    with served(store, tmp_path / "work") as live:
        for path in paths:
            store.asked.clear()
            assert live.ask(path).status == 200
    return Counter(store.asked)


def about_runs(asked: Counter[str]) -> dict[str, int]:
    """Return how often something was asked of each run."""
    return dict(Counter(item.split("/")[1] for item in asked.elements() if " runs/" in item))


def test_the_first_list_of_all_reads_each_entry_and_each_heartbeat_once(tmp_path: Path) -> None:
    store = counted("ann", "bob", "zoe")
    asked = asked_by(store, tmp_path, "/")
    stored = MemoryStore.keys(store, "runs")
    wanted = [key for key in stored if "/log/" in key or "/heartbeats/" in key]
    assert len(wanted) == 12 and {asked[f"read {key}"] for key in wanted} == {1}
    assert about_runs(asked) == dict.fromkeys(("ann", "bob", "zoe"), 6), "and the cached fold, and a fourth entry"


def test_a_list_again_asks_three_things_of_a_run_that_trains_and_two_of_another(tmp_path: Path) -> None:
    store = counted("ann")
    fabricate(store, "new")
    assert about_runs(asked_by(store, tmp_path, "/", "/")) == {"ann": 3, "new": 2}


def test_the_list_makes_rows_of_no_other_table(tmp_path: Path) -> None:
    asked_by(counted("ann"), tmp_path, "/")
    assert [path.name for path in (tmp_path / "work" / "tables").glob("*/*")] == ["runs"]


def test_comparing_runs_asks_nothing_of_the_others(tmp_path: Path) -> None:
    few, many = counted("ann", "bob"), counted("ann", "bob", *(f"run-{number}" for number in range(20)))
    page = "/compare?run=ann&run=bob"
    asked = asked_by(few, tmp_path, page, page)
    assert asked_by(many, tmp_path, page, page) == asked
    beats = {item: count for item, count in asked.items() if "/heartbeats/" in item}
    assert len(beats) == 2 and set(beats.values()) == {1}, "for the page of the run: the comparison was made already"


def test_a_report_and_its_curves_are_of_one_heartbeat() -> None:
    store = CountedStore()
    run = store_bard(store)
    store.asked.clear()
    gather_report(run.log, {})
    assert sum("/heartbeats/" in item for item in store.asked) == 1


def test_a_log_on_this_machine_is_read_past_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked, read = fabricate(LocalStore(tmp_path / "store"), "ann"), list[str](), LocalStore.read
    run.start()
    run.commit(10)

    def noted(self: LocalStore, key: str, **named: Any) -> bytes:
        asked.append(key.rpartition("/")[2])
        return read(self, key, **named)

    monkeypatch.setattr(LocalStore, "read", noted)
    assert [entry.seq for entry in run.log.read_entries()] == [0, 1, 2]
    assert asked == [], "not even for the fourth, which is not there"
