"""The probe names what is wrong with a store, and finds nothing wrong with a sound one."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.errors import ObjectMissing, StoreRefused, StoreUnavailable, StoreUnsound
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.storage.stores.store_probe import probe_store
from tests.memory_store import MemoryStore


class Ignoring(MemoryStore):
    def create(self, key: str, data: bytes) -> bool:
        self.write(key, data)
        return True


class IgnoringFolder(LocalStore):
    def create(self, key: str, data: bytes) -> bool:
        self.write(key, data)
        return True


class IgnoringOneByOne(MemoryStore):
    """Excludes among racers, but not once the object has been read."""

    def create(self, key: str, data: bytes) -> bool:
        if "race" in key:
            return super().create(key, data)
        self.write(key, data)
        return True


class TwoWinners(MemoryStore):
    def create(self, key: str, data: bytes) -> bool:
        return super().create(key, data) or data[:1] in (b"6", b"7")


class LateToExclude(MemoryStore):
    """Looks first and writes then."""

    def create(self, key: str, data: bytes) -> bool:
        absent = self.size(key) is None
        if absent:
            self.write(key, data)
        return absent


class TellsALoserItWon(MemoryStore):
    """Excludes, but keeps other bytes than the winner's."""

    def read(self, key: str) -> bytes:
        return (b"other " if "race" in key else b"") + super().read(key)


class Rejecting(MemoryStore):
    def create(self, key: str, data: bytes) -> bool:
        raise StoreRefused("cannot create: NotImplemented (501)")


class Unordered(MemoryStore):
    def first(self, prefix: str) -> str | None:
        return max(self.keys(prefix), default=None)


class StaleListing(MemoryStore):
    listed: dict[str, str | None]

    def first(self, prefix: str) -> str | None:
        self.listed = {prefix: super().first(prefix)} | getattr(self, "listed", {})
        return self.listed[prefix]


class ForgetsWrites(MemoryStore):
    def read(self, key: str) -> bytes:
        if "written" in key:
            raise ObjectMissing(key)
        return super().read(key)


class ForgetsCreated(MemoryStore):
    def read(self, key: str) -> bytes:
        if key.endswith("/2"):
            raise ObjectMissing(key)
        return super().read(key)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Ignoring, "ignores If-None-Match: the second create of one key succeeded"),
        (IgnoringOneByOne, "ignores If-None-Match: the second create of one key succeeded"),
        (TwoWinners, r"told [23] of 8 racing creators they had won"),
        (TellsALoserItWon, "keeps other bytes than the winning creator's, so create-if-absent is not atomic"),
        (Rejecting, r"rejects If-None-Match: .*501"),
        (Unordered, "lists names out of order or not fresh"),
        (StaleListing, "lists names out of order or not fresh"),
        (ForgetsWrites, "after it was written"),
        (ForgetsCreated, "an object is not there, or is another one, right after it was created"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(kind: Callable[[], MemoryStore], problem: str) -> None:
    with pytest.raises(StoreUnsound, match=f"{problem}.*choose another store"):
        probe_store(kind())


class Conflicting(MemoryStore):
    """Answers racers that it cannot say, as some stores do with 409, though one of them has won."""

    def create(self, key: str, data: bytes) -> bool:
        if super().create(key, data):
            return True
        raise StoreUnavailable("conflict (409)")


class LosesAnswers(MemoryStore):
    """Creates, and never says so."""

    def create(self, key: str, data: bytes) -> bool:
        super().create(key, data)
        raise StoreUnavailable("reset")


class Away(MemoryStore):
    def create(self, key: str, data: bytes) -> bool:
        raise StoreUnavailable("reset")


@pytest.mark.parametrize("kind", [MemoryStore, Conflicting, LosesAnswers])
def test_an_unclear_answer_to_a_loser_is_no_fault(kind: Callable[[], MemoryStore]) -> None:
    store = kind()
    probe_store(store, creators=8, rounds=3)
    assert store.keys("probe") == []


def test_a_store_that_looks_first_and_writes_then_is_refused_every_time() -> None:
    for _ in range(5):
        with pytest.raises(StoreUnsound, match=r"is not atomic; no run may be kept there, choose another store"):
            probe_store(LateToExclude())


def test_a_sound_store_is_asked_some_dozens_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Counting(MemoryStore):
        def __getattribute__(self, name: str) -> Any:
            if name in vars(ObjectStore):
                asked.append(name)
            return super().__getattribute__(name)

    probe_store(Counting())
    assert 20 < len(asked) < 60


def test_a_store_that_is_away_is_not_called_unsound() -> None:
    with pytest.raises(StoreUnavailable, match="reset"):
        probe_store(Away())


def test_a_race_as_large_as_the_doctors_finds_a_sound_store_sound_and_leaves_nothing(store: ObjectStore) -> None:
    probe_store(store, creators=32, rounds=3)
    assert store.keys("probe") == []


@pytest.mark.parametrize("left", ["probe/a/written", "probe/a/race-1", "probe/a/.race-1.b"])
def test_what_a_killed_probe_left_goes_with_a_probe_an_hour_later(left: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / "probe/a").mkdir(parents=True)
    (tmp_path / left).touch()
    probe_store(store)
    assert (tmp_path / left).exists()
    then = time.time() - 3700.0
    os.utime(tmp_path / left, (then, then))
    probe_store(store)
    assert not (tmp_path / left).exists()


def test_all_creators_race_at_once() -> None:
    class Counting(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.under_way: list[Any] = []

        def create(self, key: str, data: bytes) -> bool:
            self.under_way.append(data)
            return super().create(key, data)

    store = Counting()
    probe_store(store, creators=5, rounds=1)
    assert sorted(data[:1] for data in store.under_way[:5]) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_folder_that_creates_twice_is_described_without_a_header_of_http(tmp_path: Path) -> None:
    with pytest.raises(StoreUnsound, match="the second create of one key succeeded") as refused:
        probe_store(IgnoringFolder(tmp_path / "store"))
    assert "If-None-Match" not in str(refused.value)
