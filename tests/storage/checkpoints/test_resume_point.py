"""No quarantine on one read: what a start resumes from where reads fail once, on one host, or for good."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from tests.storage.builders import STAGED_NAMES, check_invariants, fail_to_load, flip_bit, laid_out, no_sleep, run_log


@dataclass
class TroubledReader:
    """A store as a host in trouble reads it: `fate` of a key raises, or says whether its first byte comes wrong."""

    inner: ObjectStore
    fate: Callable[[str], bool]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, key: str, **named: int) -> bytes:
        is_wrong, data = self.fate(key), self.inner.read(key, **named)
        return bytes([data[0] ^ is_wrong]) + data[1:]

    def read_chunks(self, key: str) -> Iterator[bytes]:
        is_wrong = self.fate(key)
        for chunk in self.inner.read_chunks(key):
            yield bytes([chunk[0] ^ is_wrong]) + chunk[1:]

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        is_wrong, filled = self.fate(key), self.inner.read_range(key, start, into)
        into[0] ^= is_wrong
        return filled


class Sick:
    """Reads every checkpoint object wrongly as often as `left` says."""

    def __init__(self, left: int = 1_000_000, what: str = "/checkpoints/") -> None:
        self.left, self.what, self.seen = left, what, list[str]()

    def __call__(self, key: str) -> bool:
        if self.what not in key:
            return False
        self.seen.append(key)
        self.left -= 1
        return self.left >= 0


class Unreadable:
    """Gives an error for the objects under `prefix` for ever."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def __call__(self, key: str) -> bool:
        if key.startswith(self.prefix):
            raise StoreUnavailable(f"{key}: cannot read: [Errno {errno.EIO}] Input/output error")
        return False


class Outage:
    """Is away from the first read of a checkpoint on, until one was read so often."""

    def __init__(self, left: int) -> None:
        self.left, self.began = left, False

    def __call__(self, key: str) -> bool:
        self.began |= (is_checkpoint := "/checkpoints/" in key)
        if self.began and self.left:
            self.left -= is_checkpoint
            raise StoreUnavailable(f"{key}: 503")
        return False


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


def test_a_sound_newest_checkpoint_is_returned_and_nothing_is_written(store: ObjectStore) -> None:
    log = laid_out(store, 5, 10)
    before = log.seq
    found = newest_verified(log, writer=writer())
    assert found is not None
    assert (found.step, log.seq) == (10, before)


def test_a_start_reads_no_bytes_of_a_checkpoint_that_nobody_has_failed_to_load(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    sick = Sick(left=0, what=prefix(store))
    assert newest_verified(log_of(TroubledReader(store, sick)), writer=writer(), sleep=no_sleep) is not None
    assert sick.seen == [f"{prefix(store)}/manifest.json"]


@pytest.mark.parametrize("damage", [flip_bit, lambda store, key: store.delete(key)], ids=["flipped-bit", "missing"])
@pytest.mark.parametrize("name", STAGED_NAMES)
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


@pytest.mark.parametrize("name", STAGED_NAMES)
def test_one_bad_read_of_any_object_condemns_nothing(store: ObjectStore, name: str) -> None:
    laid_out(store, 5, 10)
    found = start(TroubledReader(store, Sick(left=1, what=f"{prefix(store)}/{name}")))
    assert found is not None and found.step == 10
    assert states(store) == ["committed", "committed"]


def test_a_quarantine_names_object_hashes_looks_and_host(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    key = f"{prefix(store)}/trainer.json"
    flip_bit(store, key)
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
        start(TroubledReader(store, Sick()))
    assert states(store) == ["committed"] * 4 + ["quarantined"]


def test_a_healthy_host_takes_back_what_a_sick_one_has_condemned(store: ObjectStore) -> None:
    laid_out(store, 1, 2, 3, 4, 5)
    for _ in range(5):
        with pytest.raises(IntegrityError):
            start(TroubledReader(store, Sick()))
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
    found = start(TroubledReader(store, Unreadable(f"{prefix(store)}/trainer.json")))
    assert found is not None and found.step == 5
    assert "cannot be read" in run_log(store).refresh().checkpoints[-1].detail


def test_a_store_that_is_away_altogether_condemns_nothing(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    away = Unreadable(prefix(store))
    log = log_of(TroubledReader(store, away))
    log.refresh()
    away.prefix = "runs/"
    with pytest.raises(StoreUnavailable):
        newest_verified(log, writer=writer(), sleep=no_sleep)
    assert states(store) == ["committed", "committed"]


def test_an_outage_that_ends_with_the_last_failed_read_condemns_nothing(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    with pytest.raises(StoreUnavailable):
        start(TroubledReader(store, Outage(left=checkpoint_shard.READ_TRIES)))
    assert states(store) == ["committed", "committed"]


def test_where_no_checkpoint_verifies_each_start_gives_up_one_and_nothing_begins_at_step_0(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    for place in (0, 1):
        flip_bit(store, f"{prefix(store, place)}/trainer.json")
    with pytest.raises(IntegrityError, match="steps 10 and 5 cannot be read here"):
        start(store)
    with pytest.raises(NothingReadable, match="committed 2 checkpoints and none can be read"):
        start(store)
    assert states(store) == ["quarantined", "quarantined"]


def test_a_person_who_starts_over_waits_for_no_second_start(store: ObjectStore) -> None:
    laid_out(store, 5, 10)
    for place in (0, 1):
        flip_bit(store, f"{prefix(store, place)}/trainer.json")
    with pytest.raises(NothingReadable):
        fail_to_load(log := run_log(store))
        newest_verified(log, writer=writer(), sleep=no_sleep, quarantines_at_most=2)


def test_a_second_look_does_not_come_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    laid_out(store, 5, 10)
    key = f"{prefix(store)}/trainer.json"
    flip_bit(store, key)
    forgotten: list[Path] = []
    monkeypatch.setattr("cairn.storage.stores.local_store.forget_cached_bytes", forgotten.append)
    start(store)
    assert forgotten == [tmp_path / key] * 2
