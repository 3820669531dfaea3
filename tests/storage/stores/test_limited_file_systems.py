"""File systems without hard links, with a largest file, or that refuse to delete: each says what to do next."""

import ctypes
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.storage.errors import StoreRefused, StoreUnavailable, StoreUnsound
from cairn.storage.stores import local_disk
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.store_probe import probe_store, require_links

NO_LINKS = [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL]
names = pytest.mark.parametrize("number", sorted(set(NO_LINKS)), ids=errno.errorcode.__getitem__)


def refuse(patch: pytest.MonkeyPatch, call: str, number: int) -> None:
    def fails(*args: Any, **named: Any) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(os, call, fails)


def exclude_nothing(patch: pytest.MonkeyPatch, number: int) -> None:
    """Have the file system make neither hard links nor renames that spare a taken name."""
    refuse(patch, "link", number)
    patch.setattr(local_disk, "rename_to_new", lambda file, name: False)


@names
def test_a_file_system_without_hard_links_that_spares_taken_names_keeps_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse(monkeypatch, "link", number)
    store = LocalStore(tmp_path)
    require_links(store)
    assert probe_store(store) == ""
    assert store.create("a/b", b"first") and not store.create("a/b", b"second")
    assert store.read("a/b") == b"first" and [file.name for file in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_rename_that_cannot_spare_a_taken_name_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def without_flags(*arguments: Any) -> int:  # as file systems of FUSE that know plain renames alone
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(local_disk.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(renameat2=without_flags))
    refuse(monkeypatch, "link", errno.EPERM)
    with pytest.raises(StoreRefused, match="no renames that spare a taken name"):
        LocalStore(tmp_path).create("a/b", b"x")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_system_without_such_renames_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_disk.ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    refuse(monkeypatch, "link", errno.EPERM)
    with pytest.raises(StoreRefused, match="makes no hard links"):
        LocalStore(tmp_path).create("a/b", b"x")


ASKING: dict[str, tuple[type[StoreRefused], Callable[[Path], object]]] = {
    "an entry": (StoreRefused, lambda folder: LocalStore(folder).create("a/b", b"x")),
    "the probe": (StoreUnsound, lambda folder: probe_store(LocalStore(folder))),
    "a look where no store is yet": (StoreUnsound, lambda folder: require_links(LocalStore(folder / "not" / "there"))),
}


@names
@pytest.mark.parametrize("asking", ASKING)
def test_a_file_system_without_hard_links_is_refused_in_words_of_file_systems_and_not_of_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, asking: str
) -> None:
    exclude_nothing(monkeypatch, number)
    kind, ask = ASKING[asking]
    with pytest.raises(kind, match=r"makes no hard links, which .*; choose another --store") as refused:
        ask(tmp_path)
    assert "If-None-Match" not in str(refused.value)


def test_a_look_where_links_are_made_leaves_nothing(tmp_path: Path) -> None:
    require_links(LocalStore(tmp_path / "not" / "there"))
    assert list(tmp_path.iterdir()) == []


def test_an_immutable_folder_is_not_taken_for_a_file_system_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "replace", errno.EPERM)
    with pytest.raises(StoreRefused, match="the file system forbids it"):
        LocalStore(tmp_path).write("a/b", b"x")


def test_a_full_quota_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "fsync", errno.EDQUOT)
    with pytest.raises(StoreUnavailable, match="the disk is full") as full:
        LocalStore(tmp_path).write("a/b", b"x")
    assert not isinstance(full.value, StoreRefused)


LIMITED = """
import sys
from pathlib import Path
from cairn.storage.errors import StoreRefused
from cairn.storage.stores import local_disk
from cairn.storage.stores.local_store import LocalStore
try:
    LocalStore(Path(sys.argv[1])).write_stream("a/b", [b"x" * 65536] * 4)
except StoreRefused as refused:
    print(refused)
"""


def test_a_file_beyond_the_limit_of_its_process_is_refused_with_the_limit_to_raise(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=limit)
    assert "no file may grow that large here; raise `ulimit -f`" in done.stdout


def test_the_probe_says_why_nothing_can_be_deleted(tmp_path: Path) -> None:
    class Keeping(LocalStore):
        def delete(self, key: str) -> None:
            raise StoreRefused(f"{key}: cannot delete: no right to")

    assert probe_store(LocalStore(tmp_path / "free")) == ""
    assert "cannot delete: no right to" in probe_store(Keeping(tmp_path / "kept"))
