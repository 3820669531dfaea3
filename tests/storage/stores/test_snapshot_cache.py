import os
import time
from pathlib import Path

import pytest

from cairn.storage.errors import IntegrityError
from cairn.storage.snapshots.data_snapshot import SnapshotCache
from cairn.storage.stores.codec import sha256
from cairn.storage.stores.object_store import ExpectedObject
from tests.memory_store import MemoryStore

SIZE_BYTES = 1000


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def promised(store: MemoryStore, number: int) -> ExpectedObject:
    data = bytes([number]) * SIZE_BYTES
    store.write(f"data/{number}", data)
    return ExpectedObject(key=f"data/{number}", bytes=SIZE_BYTES, sha256=sha256(data))


def use(folder: Path, store: MemoryStore, number: int, *, limit_bytes: int = 3 * SIZE_BYTES) -> SnapshotCache:
    """Fetch an object, as if long ago."""
    cache = SnapshotCache(folder, limit_bytes=limit_bytes)
    path = cache.fetch(store, promised(store, number))
    os.utime(path, ns=(number, number))  # the greater the number the later the use, however fast this machine is
    return cache


def held(folder: Path) -> set[int]:
    return {path.read_bytes()[0] for path in folder.iterdir() if len(path.name) == 64}


def test_what_was_used_longest_ago_goes_when_the_bound_is_reached(folder: Path, store: MemoryStore) -> None:
    for number in (2, 1, 3, 4):
        use(folder, store, number)
    assert held(folder) == {2, 3, 4}


def test_a_use_makes_a_copy_young_again(folder: Path, store: MemoryStore) -> None:
    for number in (1, 2, 3):
        use(folder, store, number)
    SnapshotCache(folder, limit_bytes=0).fetch(store, promised(store, 1))
    use(folder, store, 4)
    assert held(folder) == {1, 3, 4}


def test_what_was_fetched_within_an_hour_stays_beyond_the_bound(folder: Path, store: MemoryStore) -> None:
    for number in (1, 2, 3):
        SnapshotCache(folder, limit_bytes=0).fetch(store, promised(store, number))
    assert held(folder) == {1, 2, 3}


def test_a_strangers_file_in_the_folder_is_left_alone(folder: Path, store: MemoryStore) -> None:
    folder.mkdir()
    (folder / ".mine").write_bytes(b"mine")
    use(folder, store, 1, limit_bytes=0)
    assert (folder / ".mine").read_bytes() == b"mine"


@pytest.mark.parametrize(("seconds", "left"), [(7200, 0), (60, 1)])
def test_a_download_that_was_killed_leaves_nothing_for_long(
    folder: Path, store: MemoryStore, seconds: int, left: int
) -> None:
    folder.mkdir()
    half = folder / f".{'0' * 64}-{'1' * 32}"
    half.write_bytes(b"half")
    os.utime(half, times=(time.time() - seconds,) * 2)
    use(folder, store, 1)
    assert half.exists() == left


def test_a_file_that_is_removed_under_a_reader_stays_readable_and_is_fetched_again(
    folder: Path, store: MemoryStore
) -> None:
    cache = SnapshotCache(folder, limit_bytes=0)
    path = cache.fetch(store, promised(store, 1))
    with path.open("rb") as file:
        path.unlink()
        assert file.read() == bytes([1]) * SIZE_BYTES
    assert cache.fetch(store, promised(store, 1)).read_bytes() == bytes([1]) * SIZE_BYTES


@pytest.mark.parametrize("position", [0, SIZE_BYTES // 2, SIZE_BYTES - 1])
def test_a_flipped_byte_of_a_copy_is_found_and_the_copy_replaced(
    folder: Path, store: MemoryStore, position: int
) -> None:
    path = SnapshotCache(folder, limit_bytes=0).fetch(store, promised(store, 1))
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    assert SnapshotCache(folder, limit_bytes=0).fetch(store, promised(store, 1)).read_bytes() == bytes([1]) * SIZE_BYTES


def test_other_bytes_in_the_store_never_become_a_copy(folder: Path, store: MemoryStore) -> None:
    item = promised(store, 1)
    store.write(item.key, bytes([2]) * SIZE_BYTES)
    with pytest.raises(IntegrityError, match="data/1: sha256 is"):
        SnapshotCache(folder, limit_bytes=0).fetch(store, item)
    assert held(folder) == set()
