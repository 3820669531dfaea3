"""A store without room: the log goes on in what was set aside for it, and a sweep frees the rest."""

import errno
import os
import stat
from pathlib import Path

import pytest

from cairn.storage.errors import StoreFull
from cairn.storage.stores import local_disk
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.settings import CheckpointConfig
from tests.full_amount import share_of
from tests.storage.builders import RUN, check_invariants, commit, run_log, run_with_commits, stage


class FullDisk:
    """What is below `root` may have `most_bytes`; more is refused when it is brought to the disk, as NFS does."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.most_bytes, self._fsync = root, 1 << 40, os.fsync
        patch.setattr(os, "fsync", self._find_room)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files there, of one with two names once."""
        found = [file.lstat() for file in self.root.rglob("*")]
        return sum({item.st_ino: item.st_size for item in found if stat.S_ISREG(item.st_mode)}.values())

    def fill(self) -> None:
        """Leave no room from now on."""
        self.most_bytes = self.used_bytes

    def _find_room(self, descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and self.used_bytes > self.most_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(descriptor)


KEEP_ONE = CheckpointConfig(keep_last=1, keep_best=0)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(tmp_path, monkeypatch)


@pytest.fixture
def full(disk: FullDisk) -> LocalStore:
    """Three committed checkpoints on a disk that has no room for anything else, and what was set aside."""
    store = LocalStore(disk.root)
    store.reserve()
    run_with_commits(store, 10, 20, 30)
    disk.fill()
    return store


def set_aside(store: LocalStore) -> int:
    return len(list((store.local_path("runs").parent / "reserve").glob("*")))


def test_a_full_store_takes_no_checkpoint_and_says_so(full: LocalStore) -> None:
    with pytest.raises(StoreFull, match="the disk is full; free space"):
        stage(full, step=40, attempt=1)


def test_an_entry_finds_the_room_that_was_set_aside(full: LocalStore) -> None:
    assert full.create("entries/x", b"entry") and full.read("entries/x") == b"entry"
    assert set_aside(full) == local_disk.FILES - 1


def test_an_entry_whose_name_is_taken_is_not_there_twice_on_a_full_disk_either(full: LocalStore) -> None:
    assert full.create("entries/x", b"first") and not full.create("entries/x", b"second")
    assert full.read("entries/x") == b"first"


def test_where_nothing_is_left_of_it_the_store_is_full(full: LocalStore, disk: FullDisk) -> None:
    for number in range(local_disk.FILES):
        assert full.create(f"entries/{number}", b"x")
        disk.fill()  # others take what was left over
    with pytest.raises(StoreFull):
        full.create("entries/one-more", b"x")


def test_a_sweep_frees_a_full_store_and_the_next_checkpoint_is_committed(full: LocalStore, disk: FullDisk) -> None:
    report = sweep_run(run_log(full), KEEP_ONE, "")
    assert report.freed_bytes > 0
    full.reserve()
    disk.most_bytes += 2000  # a checkpoint here is all names and numbers, of which some stay
    log = run_log(full)
    log.refresh()
    commit(log, stage(full, step=40, attempt=1))
    assert [record.committed.step for record in check_invariants(full, set()).readable] == [40, 30]


def test_without_anything_set_aside_a_sweep_first_deletes_what_needs_no_entry(disk: FullDisk) -> None:
    store = LocalStore(disk.root)
    log = run_with_commits(store, 10, 20, 30)
    store.write(f"runs/{RUN}/checkpoints/step-00000040-attempt-0000/weights", bytes(50_000))
    disk.fill()
    assert sweep_run(log, KEEP_ONE, "").freed_bytes > 50_000
    assert [record.committed.step for record in check_invariants(store, set()).readable] == [30]


def test_what_was_used_is_set_aside_again_where_there_is_room(full: LocalStore, disk: FullDisk) -> None:
    full.create("entries/x", b"entry")
    disk.fill()
    full.reserve()
    assert set_aside(full) == local_disk.FILES - 1
    disk.most_bytes *= 2
    full.reserve()
    assert set_aside(full) == local_disk.FILES


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to], ids=["symbolic link", "hard link"])
def test_a_file_of_somebody_else_never_becomes_an_entry(
    full: LocalStore, disk: FullDisk, tmp_path: Path, plant: object
) -> None:
    other = tmp_path / "letter"
    other.write_bytes(b"dear reader")
    for file in (tmp_path / "reserve").iterdir():
        file.unlink()
    plant(tmp_path / "reserve" / "entry-00", other)  # type: ignore[operator]
    disk.fill()
    with pytest.raises(StoreFull):
        full.create("entries/x", b"entry")
    assert other.read_bytes() == b"dear reader"


def test_a_reserve_behind_a_link_is_left_alone(full: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "reserve").rename(tmp_path / "photos")
    (tmp_path / "reserve").symlink_to("photos")
    with pytest.raises(StoreFull):
        full.create("entries/x", b"entry")
    assert len(os.listdir(tmp_path / "photos")) == local_disk.FILES


ROOM = range(0, 30_000, 150 * share_of(40))
"""Bytes that are free after the first commit: 200 moments at which a disk can be full."""


@pytest.mark.parametrize("room", ROOM)
def test_a_disk_that_is_full_at_any_moment_costs_no_commit_and_a_sweep_lets_the_run_go_on(
    disk: FullDisk, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_disk, "FILE_BYTES", 2048)
    store = LocalStore(disk.root)
    store.reserve()
    log = run_with_commits(store, 10)
    disk.most_bytes = disk.used_bytes + room
    acknowledged = set[str]()
    for step in range(20, 90, 10):
        try:
            staged = stage(store, step=step, attempt=1)
            commit(log, staged)
        except StoreFull:
            sweep_run(run_log(store), KEEP_ONE, "")
            store.reserve()
        else:
            acknowledged.add(staged.prefix)
    check_invariants(store, acknowledged)


def test_room_that_is_still_being_made_is_given_to_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, sync = list[bool](), os.fsync

    def take_meanwhile(descriptor: int) -> None:
        if not taken:
            taken.append(local_disk.take_reserve(tmp_path, tmp_path / "taken"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", take_meanwhile)
    local_disk.fill_reserve(tmp_path)
    assert taken == [False] and len(list((tmp_path / "reserve").iterdir())) == local_disk.FILES
