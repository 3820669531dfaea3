"""No quarantine on one read: what a start resumes from where reads fail once, on one host, or for good."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.checkpoints import checkpoint_shard
from cairn.storage.checkpoints.resume_point import newest_verified
from cairn.storage.errors import IntegrityError, NothingReadable, StoreUnavailable
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from tests.entries import writer
from tests.storage.builders import check_invariants, fail_to_load, laid_out, no_sleep, run_log

NAMES = (
    "weights-00001-of-00002.safetensors",
    "weights-00002-of-00002.safetensors",
    "optimizer-00001-of-00001.safetensors",
    "trainer.json",
    "manifest.json",
)


@dataclass
class SickReader:
    """A host that reads every checkpoint object wrongly as often as `left` says; what it writes is sound."""

    inner: ObjectStore
    left: int = 1_000_000
    what: str = "/checkpoints/"
    read_again: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, key: str, **named: int) -> bytes:
        data = self.inner.read(key, **named)
        return bytes([data[0] ^ 1]) + data[1:] if self._fails(key) else data

    def read_chunks(self, key: str) -> Iterator[bytes]:
        fails = self._fails(key)
        for chunk in self.inner.read_chunks(key):
            yield bytes([chunk[0] ^ 1]) + chunk[1:] if fails else chunk

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        filled = self.inner.read_range(key, start, into)
        into[0] ^= self._fails(key)
        return filled

    def _fails(self, key: str) -> bool:
        if self.what not in key:
            return False
        self.read_again.append(key)
        self.left -= 1
        return self.left >= 0


@dataclass
class Unreadable:
    """A store that answers, and gives an error for the objects under `prefix` for ever."""

    inner: ObjectStore
    prefix: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, key: str, **named: int) -> bytes:
        self._refuse(key)
        return self.inner.read(key, **named)

    def read_chunks(self, key: str) -> Iterator[bytes]:
        self._refuse(key)
        return self.inner.read_chunks(key)

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        self._refuse(key)
        return self.inner.read_range(key, start, into)

    def _refuse(self, key: str) -> None:
        if key.startswith(self.prefix):
            raise StoreUnavailable(f"{key}: cannot read: [Errno {errno.EIO}] Input/output error")


@dataclass
class Outage:
    """A store that is away from the first read of a checkpoint on, until one was read so often."""

    inner: ObjectStore
    left: int
    began: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, key: str, **named: int) -> bytes:
        self.began |= (is_checkpoint := "/checkpoints/" in key)
        if self.began and self.left:
            self.left -= is_checkpoint
            raise StoreUnavailable(f"{key}: 503")
        return self.inner.read(key, **named)


def start(store: object) -> CheckpointReference | None:
    """Do what a claim does before it claims, after an attempt that could not load what it resumed from."""
    log = log_of(store)
    fail_to_load(log)
    return newest_verified(log, writer=writer(), sleep=no_sleep)


def log_of(store: object) -> RunLog:
    return run_log(store)  # type: ignore[arg-type]


def states(store: object) -> list[str]:
    return [record.state for record in log_of(store).refresh().checkpoints]


def prefix(store: ObjectStore, place: int = -1) -> str:
    return run_log(store).refresh().checkpoints[place].committed.prefix


def flip(store: ObjectStore, key: str) -> None:
    data = bytearray(store.read(key))
    data[len(data) // 2] ^= 1
    store.write(key, bytes(data))


def test_a_sound_newest_checkpoint_is_returned_and_nothing_is_written(store: ObjectStore) -> None:
    log = laid_out(store, 5, 10)
    before = log.seq
    found = newest_verified(log, writer=writer())
    assert found is not None
    assert (found.step, log.seq) == (10, before)


def test_a_start_reads_no_bytes_of_a_checkpoint_that_nobody_has_failed_to_load(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    reader = SickReader(store, left=0, what=prefix(store))
    assert newest_verified(log_of(reader), writer=writer(), sleep=no_sleep) is not None
    assert reader.read_again == [f"{prefix(store)}/manifest.json"]


@pytest.mark.parametrize("damage", [flip, lambda store, key: store.delete(key)], ids=["flipped-bit", "missing"])
@pytest.mark.parametrize("name", NAMES)
def test_damage_to_any_object_quarantines_the_newest_and_resumes_from_the_one_before(
    store: ObjectStore, name: str, damage: Callable[[ObjectStore, str], None]
) -> None:
    laid_out(store, 5, 10)
    newest = prefix(store)
    damage(store, f"{newest}/{name}")
    found = start(store)
    assert found is not None
    assert found.step == 5
    bad = run_log(store).refresh().checkpoints[-1]
    assert (bad.state, f"{newest}/{name}" in bad.detail) == ("quarantined", True)
    check_invariants(store, {found.prefix, newest})


@pytest.mark.parametrize("name", NAMES)
def test_one_bad_read_of_any_object_condemns_nothing(store: ObjectStore, name: str) -> None:
    laid_out(store, 5, 10)
    found = start(SickReader(store, left=1, what=f"{prefix(store)}/{name}"))
    assert found is not None and found.step == 10
    assert states(store) == ["committed", "committed"]


def test_a_quarantine_names_object_hashes_looks_and_host(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    key = f"{prefix(store)}/trainer.json"
    flip(store, key)
    start(store)
    (evidence,) = run_log(store).refresh().checkpoints[-1].evidence
    assert (evidence.key, evidence.reads, evidence.host) == (key, 3, os.uname().nodename)
    assert len(evidence.expected) == 64 and evidence.found.startswith("sha256 is ")
    assert evidence.expected not in evidence.found


def test_a_host_that_reads_everything_wrongly_condemns_one_checkpoint_and_says_that_it_may_be_sick(
    store: ObjectStore,
) -> None:
    laid_out(store, 1, 2, 3, 4, 5)
    with pytest.raises(IntegrityError, match=r"may be at fault.*Start on another host"):
        start(SickReader(store))
    assert states(store) == ["committed"] * 4 + ["quarantined"]


def test_a_healthy_host_takes_back_what_a_sick_one_has_condemned(store: ObjectStore) -> None:
    laid_out(store, 1, 2, 3, 4, 5)
    for _ in range(5):
        with pytest.raises(IntegrityError):
            start(SickReader(store))
    assert states(store) == ["quarantined"] * 5
    found = start(store)
    assert found is not None and found.step == 5
    assert states(store)[-1] == "committed"
    check_invariants(store, {found.prefix})


def test_objects_that_were_away_for_one_start_are_resumed_from_when_they_are_back(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    away = {key: store.read(key) for key in store.keys("runs/r1/checkpoints")}
    for key in away:
        store.delete(key)
    with pytest.raises(IntegrityError):
        start(store)
    for key, data in away.items():
        store.write(key, data)
    found = start(store)
    assert found is not None and found.step == 10


def test_an_object_that_gives_an_error_for_ever_lets_the_start_fall_back(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    found = start(Unreadable(store, f"{prefix(store)}/trainer.json"))
    assert found is not None and found.step == 5
    assert "cannot be read" in run_log(store).refresh().checkpoints[-1].detail


def test_a_store_that_is_away_altogether_condemns_nothing(store: ObjectStore) -> None:
    laid_out(store, 5, 10)

    away = Unreadable(store, prefix(store))
    log = log_of(away)
    log.refresh()
    away.prefix = "runs/"
    with pytest.raises(StoreUnavailable):
        newest_verified(log, writer=writer(), sleep=no_sleep)
    assert states(store) == ["committed", "committed"]


def test_an_outage_that_ends_with_the_last_failed_read_condemns_nothing(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    with pytest.raises(StoreUnavailable):
        start(Outage(store, left=checkpoint_shard.READ_TRIES))
    assert states(store) == ["committed", "committed"]


def test_where_no_checkpoint_verifies_each_start_gives_up_one_and_nothing_begins_at_step_0(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    for place in (0, 1):
        flip(store, f"{prefix(store, place)}/trainer.json")
    with pytest.raises(IntegrityError, match="steps 10 and 5 cannot be read here"):
        start(store)
    with pytest.raises(NothingReadable, match="committed 2 checkpoints and none can be read"):
        start(store)
    assert states(store) == ["quarantined", "quarantined"]


def test_a_person_who_starts_over_waits_for_no_second_start(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    for place in (0, 1):
        flip(store, f"{prefix(store, place)}/trainer.json")
    with pytest.raises(NothingReadable):
        fail_to_load(log := run_log(store))
        newest_verified(log, writer=writer(), sleep=no_sleep, quarantines_at_most=2)


def test_a_second_look_does_not_come_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    laid_out(store, 5, 10)
    key = f"{prefix(store)}/trainer.json"
    flip(store, key)
    forgotten: list[Path] = []
    monkeypatch.setattr("cairn.storage.stores.local_store.forget_cached_bytes", forgotten.append)
    start(store)
    assert forgotten == [tmp_path / key] * 2
