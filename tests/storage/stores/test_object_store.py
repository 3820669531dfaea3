"""What every backend must do alike, and the keys none may follow."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.errors import ObjectMissing
from cairn.storage.stores.codec import sha256
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ExpectedObject, ObjectStore, check_key, find_damage, write_hashed
from tests.memory_store import MemoryStore
from tests.processes.waiting import patience_seconds
from tests.storage.store_operations import OPERATIONS, refuse_bad_keys


def test_a_key_that_could_leave_the_root_is_refused_by_every_operation(store: ObjectStore) -> None:
    refuse_bad_keys(store)


def test_every_operation_is_tried_with_bad_keys() -> None:
    offered = {name for name in vars(ObjectStore) if not name.startswith("_")} - {"url", "reserve"}
    assert set(OPERATIONS) == offered


@pytest.mark.parametrize("key", ["a", "runs/r1/log/9999999999.json", "step-00000005-attempt-0001", "a@b=c+d_e"])
def test_a_plain_key_is_returned_unchanged(key: str) -> None:
    assert check_key(key) == key


def test_create_makes_an_object_once(store: ObjectStore) -> None:
    assert [store.create("a/b", b"1"), store.create("a/b", b"2"), store.read("a/b")] == [True, False, b"1"]


def test_the_sizes_below_a_folder_are_told_by_key_and_no_others(store: ObjectStore) -> None:
    for key, data in (("a/b", b"1"), ("a/c/d", b"22"), ("ab/c", b"333")):
        store.write(key, data)
    assert (list(store.sizes("a").items()), store.sizes("b")) == ([("a/b", 1), ("a/c/d", 2)], {})


def test_an_object_is_as_old_as_the_store_says(store: ObjectStore, tmp_path: Path) -> None:
    store.write("a/b", b"1")
    assert store.age_seconds("a/none") is None
    if isinstance(store, MemoryStore):
        assert store.age_seconds("a/b") is None
        return
    fresh = store.age_seconds("a/b")
    assert fresh is not None and -1.0 <= fresh < patience_seconds()
    if isinstance(store, LocalStore):
        os.utime(tmp_path / "store" / "a" / "b", (1e9, 1e9))
        old = store.age_seconds("a/b")
        assert old is not None and old > 1e8
        assert store.keys("a") == ["a/b"] == [f"a/{path.name}" for path in (tmp_path / "store" / "a").iterdir()]


def test_many_objects_are_deleted_at_once_whether_they_are_there_or_not(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cairn.storage.stores.s3_store.PAGE_KEYS", 2)
    for name in "abcde":
        store.write(f"a/{name}", b"1")
    store.delete_all(["a/a", "a/b", "a/none", "a/c", "a/e"])
    store.delete_all([])
    assert store.keys("a") == ["a/d"]


def test_write_overwrites(store: ObjectStore) -> None:
    store.write("a/b", b"1")
    store.write("a/b", b"2")
    assert store.read("a/b") == b"2"


def test_a_stream_is_hashed_as_it_is_written(store: ObjectStore) -> None:
    written = write_hashed(store, "a/b", iter([b"12", memoryview(b"345"), b""]))
    assert store.read("a/b") == b"12345"
    assert (written.bytes, written.sha256) == (5, hashlib.sha256(b"12345").hexdigest())


@pytest.mark.parametrize(
    ("start", "size", "expected"),
    [(0, 2, b"01"), (3, 4, b"3456"), (8, 5, b"89"), (10, 3, b""), (99, 3, b""), (4, 0, b"")],
)
def test_a_range_is_read_into_memory_as_far_as_the_object_goes(
    store: ObjectStore, start: int, size: int, expected: bytes
) -> None:
    store.write("a/b", b"0123456789")
    into = memoryview(bytearray(size))
    assert (store.read_range("a/b", start, into), bytes(into[: len(expected)])) == (len(expected), expected)


def test_a_range_of_no_object_is_missing(store: ObjectStore) -> None:
    with pytest.raises(ObjectMissing, match="a/b"):
        store.read_range("a/b", 0, memoryview(bytearray(1)))


@pytest.mark.parametrize("before", [None, b"old"], ids=["nothing", "an object"])
def test_a_stream_that_breaks_leaves_what_was_there(store: ObjectStore, before: bytes | None) -> None:
    def broken() -> Any:
        yield b"12"
        raise RuntimeError("broke")

    if before is not None:
        store.write("a/b", before)
    with pytest.raises(RuntimeError, match="broke"):
        store.write_stream("a/b", broken())
    assert (store.keys("a"), store.size("a/b")) == (([], None) if before is None else (["a/b"], 3))


@pytest.mark.parametrize("key", ["a", "a/b", "a/b/c/d"], ids=["folder", "absent", "below-an-object"])
def test_what_is_no_object_is_missing(store: ObjectStore, key: str) -> None:
    store.write("a/b/c" if key == "a/b/c/d" else "a/x", b"1")
    with pytest.raises(ObjectMissing, match=key):
        store.read(key)
    assert store.size(key) is None


def test_deleting_what_is_not_there_is_no_error(store: ObjectStore) -> None:
    store.write("a/b", b"1")
    for key in ("a/b", "a/b", "never/there"):
        store.delete(key)
    assert store.keys("a") == []


def test_listing_is_sorted_and_keeps_to_its_folder(store: ObjectStore) -> None:
    for key in ("a/2", "a/10", "a/b/c", "ab/1", "z"):
        store.write(key, b"")
    assert store.keys("a") == ["a/10", "a/2", "a/b/c"]


def test_listing_nothing_is_empty(store: ObjectStore) -> None:
    assert (store.keys("a"), store.first("a")) == ([], None)


def test_first_is_the_smallest_name_directly_in_the_folder(store: ObjectStore) -> None:
    for key in ("a/2", "a/3", "a/1/deeper"):
        store.write(key, b"")
    assert store.first("a") == "a/2"


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    assert store.create("a/b", b"")
    assert (store.read("a/b"), store.size("a/b")) == (b"", 0)


def test_an_object_is_read_in_pieces_as_in_one(store: ObjectStore) -> None:
    data = bytes(range(256)) * (80 * 1024)
    store.write("a/b", data)
    assert b"".join(store.read_chunks("a/b")) == data


def test_reading_what_is_not_there_in_pieces_is_missing(store: ObjectStore) -> None:
    with pytest.raises(ObjectMissing, match="a/b"):
        next(iter(store.read_chunks("a/b")))


def test_folders_are_named_once_and_objects_are_not(store: ObjectStore) -> None:
    for key in ("a/x/1", "a/x/2", "a/y/z/1", "a/1", "ab/z/1"):
        store.write(key, b"")
    assert (store.folders("a"), store.folders("never")) == (["a/x", "a/y"], [])


def test_a_finished_write_leaves_nothing_unfinished(store: ObjectStore) -> None:
    store.write("a/b", b"1")
    store.create("a/c", b"1")
    store.create("a/c", b"2")
    store.write_stream("a/d", [b"1"])
    assert store.unfinished("a") == []


@pytest.mark.parametrize(
    ("data", "found"),
    [(None, "missing"), (b"st", "2 bytes"), (b"stones", "6 bytes or more"), (b"stonE", "sha256 is")],
    ids=["missing", "shorter", "longer", "another"],
)
def test_an_object_that_is_not_the_one_that_was_written_says_how(data: bytes | None, found: str) -> None:
    store = MemoryStore()
    if data is not None:
        store.write("a/b", data)
    damage = find_damage(store, ExpectedObject(key="a/b", bytes=5, sha256=sha256(b"stone")))
    assert damage is not None and damage.found.startswith(found)
