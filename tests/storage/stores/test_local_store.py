"""What a folder can do to a store, said so that a person knows what to do next."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.errors import StorageError, StoreFull, StoreRefused, StoreUnavailable
from cairn.storage.stores import local_disk
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import UnfinishedWrite
from tests.storage.store_operations import OPERATIONS


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """Permissions bind nobody who is root: be nobody for the length of the test."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach (pytest's own belong to one user), whose mode the test changes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LocalStore(folder).write("a/b", b"1")
        folder.chmod(0o755)
        yield folder
        for path in (folder, folder / "a"):
            path.chmod(0o755)


@pytest.mark.parametrize("operation", ["create", "write", "write_stream"])
def test_a_folder_that_cannot_be_written_says_so_with_a_hint(
    open_folder: Path, operation: str, request: pytest.FixtureRequest
) -> None:
    open_folder.chmod(0o555)
    request.getfixturevalue("ordinary_user")
    with pytest.raises(StoreUnavailable, match="make it writable or choose another --store"):
        OPERATIONS[operation](LocalStore(open_folder), "new/b")


@pytest.mark.parametrize(
    "operation", ["read", "create", "write", "read_chunks", "write_stream", "keys", "folders", "first", "size"]
)
def test_a_folder_that_may_not_be_entered_is_unavailable_not_empty(
    open_folder: Path, operation: str, request: pytest.FixtureRequest
) -> None:
    (open_folder / "a").chmod(0)
    request.getfixturevalue("ordinary_user")
    with pytest.raises(StoreUnavailable, match="Permission denied"):
        OPERATIONS[operation](LocalStore(open_folder), "a" if operation in ("keys", "folders", "first") else "a/b")


@pytest.mark.parametrize("operation", ["create", "write", "write_stream"])
@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_where_the_folder_should_be_says_so_with_a_hint(tmp_path: Path, operation: str, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="a file stands where the store's folder should be"):
        OPERATIONS[operation](LocalStore(tmp_path / "file" / below), "a/b")


@pytest.mark.parametrize("operation", ["keys", "folders", "first", "size", "delete"])
def test_a_file_where_the_folder_should_be_holds_nothing(tmp_path: Path, operation: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert OPERATIONS[operation](LocalStore(tmp_path / "file"), "a/b") in ([], None)


def failing(number: int) -> Callable[..., None]:
    """Return a call of the operating system that fails."""

    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "kind", "hint"),
    [
        (errno.ENOSPC, StoreFull, "the disk is full"),
        (errno.EACCES, StoreRefused, "make it writable"),
        (errno.EROFS, StoreRefused, "the file system is read-only"),
        (errno.EPERM, StoreRefused, "makes no hard links"),
        (errno.EIO, StoreUnavailable, "see the cause"),
    ],
)
def test_an_error_of_the_operating_system_has_a_kind_and_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StoreUnavailable], hint: str
) -> None:
    monkeypatch.setattr(os, "link", failing(number))
    monkeypatch.setattr(local_disk, "rename_to_new", lambda file, name: False)
    with pytest.raises(StoreUnavailable, match=hint) as raised:
        LocalStore(tmp_path).create("a/b", b"x")
    assert type(raised.value) is kind


@pytest.mark.parametrize(("call", "operation"), [("link", "create"), ("fsync", "write"), ("replace", "write")])
def test_a_failed_operation_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, operation: str
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(os, call, failing(errno.EIO))
    with pytest.raises(StoreUnavailable):
        OPERATIONS[operation](LocalStore(tmp_path), "a/b")
    assert list((tmp_path / "a").iterdir()) == []


def test_opening_a_store_makes_no_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    assert (store.keys("runs"), (tmp_path / "store").exists()) == ([], False)


def test_deleting_the_last_object_takes_its_folder_away(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("probe/a", b"")
    store.delete("probe/a")
    assert not (tmp_path / "probe").exists()


def test_a_relative_folder_stays_where_it_was_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore(Path("store"))
    monkeypatch.chdir("/")
    store.write("a/b", b"1")
    assert (tmp_path / "store/a/b").read_bytes() == b"1"


def test_what_a_killed_writer_left_is_found_and_discarded(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("a/b.json", b"whole")
    (tmp_path / "a" / ".b.json.0123456789abcdef").write_bytes(b"half")
    [left] = store.unfinished("a")
    assert (left.key, left.bytes, store.keys("a")) == ("a/b.json", 4, ["a/b.json"])
    store.discard(left)
    store.discard(left)
    assert (store.unfinished("a"), store.read("a/b.json")) == ([], b"whole")


def test_discarding_never_takes_an_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("a/b", b"1")
    with pytest.raises(StorageError, match="must name a temporary file"):
        store.discard(UnfinishedWrite(key="a/b", bytes=1, age_seconds=0.0, token="b"))
