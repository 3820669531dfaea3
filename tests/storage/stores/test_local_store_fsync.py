"""System calls that fail: what a failed fsync should have made durable is not acknowledged, whatever a reader sees."""

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.errors import NotDurable, StorageError, StoreUnavailable
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import RetryPolicy
from tests.storage.builders import check_invariants, claim, commit, laid_out, no_sleep, run_log, stage
from tests.storage.store_operations import OPERATIONS

pytestmark = pytest.mark.linux  # /proc gives the path of a file descriptor


class FailingDisk:
    """A disk whose fsync number `at` fails; the kernel then forgets what was not on disk (compare fsyncgate, 2018).

    `cut_power` takes back what no later success made durable: names whose folder failed, and files whose bytes failed.
    """

    def __init__(self, patch: pytest.MonkeyPatch, at: int | None = None) -> None:
        self.at, self.synced, self.failed = at, list[Path](), Path()
        self._lost, self._unsynced = set[Path](), defaultdict[Path, set[Path]](set)
        self._fsync = os.fsync
        patch.setattr(os, "fsync", self.fsync)
        for name in ("link", "replace", "mkdir"):
            patch.setattr(os, name, self._naming(getattr(os, name)))

    def fsync(self, descriptor: int) -> None:
        """Write a file or a folder to disk, or fail."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.synced.append(path)
        names = self._unsynced.pop(path, {path})
        if len(self.synced) - 1 == self.at:
            self.failed = path
            self._lost |= names
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._lost -= {path} if path.is_file() else set()

    def cut_power(self) -> None:
        """Remove what is not on disk."""
        for path in self._lost:
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)

    def _naming(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def named(*paths: Any, **options: Any) -> None:
            call(*paths, **options)
            path = Path(paths[1] if len(paths) > 1 and not isinstance(paths[1], int) else paths[0])
            self._lost.discard(path)
            if len(paths) > 1 and paths[0] in self._lost:
                self._lost.add(path)
            self._unsynced[path.parent].add(path)

        return named


def is_temporary(path: Path) -> bool:
    return path.name.startswith(".")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store whose folder `a` is there and on disk."""
    store = LocalStore(tmp_path)
    store.write("a/there", b"")
    return store


def test_a_create_whose_folder_is_not_on_disk_is_visible_and_not_durable(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch, at=1)
    with pytest.raises(NotDurable, match="is visible, but the fsync of its folder failed"):
        store.create("a/b", b"x")
    assert (disk.failed.name, store.read("a/b")) == ("a", b"x")


@pytest.mark.parametrize("operation", ["create", "write", "write_stream"])
def test_an_object_whose_bytes_are_not_on_disk_is_not_there(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    disk = FailingDisk(monkeypatch, at=0)
    with pytest.raises(StoreUnavailable, match="Input/output error"):
        OPERATIONS[operation](store, "a/b")
    assert is_temporary(disk.failed)
    assert store.keys("a") == ["a/there"]


@pytest.mark.parametrize("operation", ["write", "write_stream"])
def test_a_write_whose_folder_is_not_on_disk_is_not_acknowledged_and_its_repetition_is_durable(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    disk = FailingDisk(monkeypatch, at=1)
    with pytest.raises(StoreUnavailable):
        OPERATIONS[operation](store, "a/b")
    OPERATIONS[operation](store, "a/b")
    disk.cut_power()
    assert (disk.failed.name, store.read("a/b")) == ("a", b"x")


@pytest.mark.parametrize("operation", ["create", "write", "write_stream"])
def test_a_new_folder_whose_name_is_not_on_disk_is_made_anew_by_a_repetition(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    disk = FailingDisk(monkeypatch, at=0)
    with pytest.raises(StoreUnavailable):
        OPERATIONS[operation](store, "new/b")
    OPERATIONS[operation](store, "new/b")
    disk.cut_power()
    assert (disk.failed, store.read("new/b")) == (disk.synced[1], b"x")


def commit_as_a_run_does(store: LocalStore, acknowledged: set[str]) -> None:
    """Stage and commit step 10 with a run's retries; note what was acknowledged."""
    retry, log = RetryPolicy(tries=5, sleep=no_sleep), run_log(store)
    staged = retry.call(lambda: stage(store, step=10, attempt=1))
    retry.call(lambda: commit(log, staged))
    acknowledged.add(staged.prefix)


def require_that_the_run_goes_on(store: LocalStore, acknowledged: set[str]) -> None:
    """What was acknowledged is there, and another attempt commits."""
    check_invariants(store, acknowledged)
    log = run_log(store)
    commit(log, stage(store, step=10, attempt=claim(log)))
    check_invariants(store, acknowledged)


@pytest.mark.parametrize("power", ["stays", "is-cut"])
def test_a_failed_fsync_anywhere_in_a_commit_acknowledges_nothing_that_may_be_lost(tmp_path: Path, power: str) -> None:
    outcomes = list[bool]()
    for at in count():
        store = LocalStore(tmp_path / str(at))
        acknowledged = {record.committed.prefix for record in laid_out(store, 5).state.readable}
        with pytest.MonkeyPatch.context() as patch:
            disk = FailingDisk(patch, at)
            with suppress(StorageError):
                commit_as_a_run_does(store, acknowledged)
        if len(disk.synced) <= at:
            break
        outcomes.append(len(acknowledged) == 2)
        if power == "is-cut":
            disk.cut_power()
        require_that_the_run_goes_on(store, acknowledged)
    assert outcomes == [True] * (len(outcomes) - 1) + [False]
    assert len(outcomes) > 10


def fail_once(patch: pytest.MonkeyPatch, names: Sequence[str], at: int) -> list[int]:
    """Have the call number `at` of these fail; returns the errors, of which there is none if fewer calls are made."""
    numbers, errors = count(), list[int]()

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if next(numbers) == at:
                errors.append((errno.EIO, errno.ENOSPC)[at % 2])
                raise OSError(errors[0], os.strerror(errors[0]))
            return call(*arguments, **named)

        return counted

    for name in names:
        patch.setattr(os, name, wrapped(getattr(os, name)))
    return errors


@pytest.mark.parametrize(
    ("names", "least"),
    [(("open",), 12), (("write", "writev"), 5), (("link",), 1), (("replace",), 5), (("mkdir",), 1)],
    ids=["open", "write", "link", "rename", "mkdir"],
)
def test_a_commit_one_of_whose_system_calls_fails_loses_nothing_acknowledged(
    tmp_path: Path, names: tuple[str, ...], least: int
) -> None:
    for at in count():
        store = LocalStore(tmp_path / str(at))
        acknowledged = {record.committed.prefix for record in laid_out(store, 5).state.readable}
        with pytest.MonkeyPatch.context() as patch:
            errors = fail_once(patch, names, at)
            with suppress(StorageError):
                commit_as_a_run_does(store, acknowledged)
        if not errors:
            break
        require_that_the_run_goes_on(store, acknowledged)
    assert at >= least and len(acknowledged) == 2, "without a failure it commits"
