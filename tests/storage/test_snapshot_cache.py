import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.errors import IntegrityError, StorageError
from storage.snapshots.snapshot_cache import DEFAULT_CACHE_BYTES, SnapshotCache, cache_bytes
from storage.stores.document import sha256
from storage.stores.verified_object import ExpectedObject
from tests.memory_store import MemoryStore

SIZE_BYTES = 1000
USES_ONE = """
import sys
from pathlib import Path
from tests.memory_store import MemoryStore
from storage.snapshots.snapshot_cache import SnapshotCache
from storage.stores.verified_object import ExpectedObject
data = bytes([int(sys.argv[2])]) * 1000
store = MemoryStore()
store.write("o", data)
import hashlib
cache = SnapshotCache(Path(sys.argv[1]), limit_bytes=10_000)
cache.fetch(store, ExpectedObject(key="o", bytes=1000, sha256=hashlib.sha256(data).hexdigest()))
print("in use", flush=True)
sys.stdin.read()
"""


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
    """Fetch an object; it is in use for as long as what is returned is referred to."""
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


def test_what_is_in_use_stays_beyond_the_bound(folder: Path, store: MemoryStore) -> None:
    used = [use(folder, store, number, limit_bytes=SIZE_BYTES) for number in (1, 2, 3)]
    assert held(folder) == {1, 2, 3} and used


def test_what_a_cache_no_longer_refers_to_may_go(folder: Path, store: MemoryStore) -> None:
    used = use(folder, store, 1, limit_bytes=0)
    del used
    use(folder, store, 2, limit_bytes=0)
    assert held(folder) == {2}


@pytest.fixture
def other_process(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that uses object 1."""
    command = [sys.executable, "-c", USES_ONE, str(folder), "1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "in use\n"
    yield process
    process.kill()
    process.communicate(timeout=240)


def test_what_another_living_process_uses_stays(
    folder: Path, store: MemoryStore, other_process: "subprocess.Popen[str]"
) -> None:
    use(folder, store, 2, limit_bytes=0)
    use(folder, store, 3, limit_bytes=0)
    assert held(folder) == {1, 3}


def test_what_a_killed_process_used_may_go(
    folder: Path, store: MemoryStore, other_process: "subprocess.Popen[str]"
) -> None:
    other_process.kill()
    other_process.wait(timeout=240)
    use(folder, store, 2, limit_bytes=0)
    assert held(folder) == {2} and len(list((folder / "leases").iterdir())) == 1


def test_starts_that_find_everything_leave_no_heap_of_leases(folder: Path, store: MemoryStore) -> None:
    for _ in range(5):
        use(folder, store, 1)
    assert len(list((folder / "leases").iterdir())) == 1


def test_a_strangers_file_in_the_folder_is_left_alone(folder: Path, store: MemoryStore) -> None:
    folder.mkdir()
    (folder / ".mine").write_bytes(b"mine")
    use(folder, store, 1, limit_bytes=0)
    assert (folder / ".mine").read_bytes() == b"mine"


def test_a_download_that_was_killed_leaves_nothing_for_long(folder: Path, store: MemoryStore) -> None:
    folder.mkdir()
    (folder / f".{'0' * 32}-{'1' * 32}").write_bytes(b"half")
    use(folder, store, 1)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_download_under_way_is_left_alone(folder: Path, store: MemoryStore) -> None:
    used = use(folder, store, 1)
    lease = next((folder / "leases").iterdir())
    (folder / f".{lease.name}-{'1' * 32}").write_bytes(b"half")
    use(folder, store, 2)
    assert (folder / f".{lease.name}-{'1' * 32}").is_file() and used


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


def test_the_environment_sets_the_bound() -> None:
    assert (cache_bytes({}), cache_bytes({"CAIRN_CACHE_BYTES": "7"})) == (DEFAULT_CACHE_BYTES, 7)


@pytest.mark.parametrize("value", ["-1", "50GB", "1e9"])
def test_a_bound_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(StorageError, match=r"CAIRN_CACHE_BYTES = .*: must be a whole number of bytes"):
        cache_bytes({"CAIRN_CACHE_BYTES": value})
