"""Death between the operating system's calls inside one local operation: the object is whole or absent."""

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.stores.local_store import LocalStore
from tests.storage.builders import RUN, check_invariants, claim, commit, run_log, run_with_commits, stage
from tests.storage.faulty_store import Death

CALLS = ("mkdir", "open", "fsync", "link", "replace", "unlink", "close", "rmdir")


class Mortal:
    """Counts the operating system's calls below one folder; at number `at` the process is dead, and stays dead."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, *, after: bool) -> None:
        self.at, self.after, self.number, self.dead = at, after, 0, False
        for name in CALLS:
            patch.setattr(os, name, self.wrapped(getattr(os, name)))

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            number, self.number = self.number, self.number + 1
            if self.dead:
                raise Death
            if number == self.at:
                self.dead = True
                if self.after:
                    call(*args, **options)
                raise Death
            return call(*args, **options)

        return counted


def outcomes(tmp_path: Path, operation: Callable[[LocalStore], object], *, after: bool) -> list[bytes | None]:
    """What a fresh reader finds under `a/b` after death at each call of the operation in turn."""
    found: list[bytes | None] = []
    for at in count():
        root = tmp_path / f"{after}-{at}"
        root.mkdir()
        with pytest.MonkeyPatch.context() as patch, suppress(Death):
            mortal = Mortal(patch, at, after=after)
            operation(LocalStore(root))
        if not mortal.dead:
            return found
        reader = LocalStore(root)
        names = reader.keys("a")
        assert names in ([], ["a/b"])
        found.append(reader.read("a/b") if names else None)
    raise AssertionError


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda store: store.create("a/b", b"whole"), id="create"),
        pytest.param(lambda store: store.write("a/b", b"whole"), id="write"),
        pytest.param(lambda store: store.write_stream("a/b", [b"wh", b"ole"]), id="write_stream"),
    ],
)
def test_death_at_any_system_call_leaves_the_object_whole_or_absent(
    tmp_path: Path, operation: Callable[[LocalStore], object], after: bool
) -> None:
    found = outcomes(tmp_path, operation, after=after)
    assert set(found) == {None, b"whole"}
    assert len(found) >= 4


def test_death_while_overwriting_leaves_the_old_bytes_or_the_new(tmp_path: Path) -> None:
    def overwrite(store: LocalStore) -> None:
        store.write("a/b", b"new")

    seen = set()
    for at in count():
        root = tmp_path / str(at)
        LocalStore(root).write("a/b", b"old")
        with pytest.MonkeyPatch.context() as patch, suppress(Death):
            mortal = Mortal(patch, at, after=True)
            overwrite(LocalStore(root))
        if not mortal.dead:
            break
        seen.add(LocalStore(root).read("a/b"))
    assert seen == {b"old", b"new"}


def test_leftovers_of_a_dead_writer_are_seen_by_no_reader(tmp_path: Path) -> None:
    left = list[str]()
    for at in count():
        store = LocalStore(tmp_path / str(at))
        with pytest.MonkeyPatch.context() as patch, suppress(Death):
            mortal = Mortal(patch, at, after=True)
            store.create("a/b", b"whole")
        if not mortal.dead:
            break
        if not (tmp_path / str(at) / "a" / "b").exists():
            left += [path.name[:3] for path in (tmp_path / str(at)).glob("a/.*")]
            assert (store.keys("a"), store.first("a")) == ([], None)
    assert ".b." in left


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_death_at_any_system_call_of_a_commit_leaves_the_old_or_the_new_newest(
    tmp_path: Path, after: bool, record_property: Callable[[str, object], None]
) -> None:
    seen = set()
    for at in count():
        store = LocalStore(tmp_path / str(at))
        old = run_with_commits(store, 5).state.newest_committed
        assert old is not None
        with pytest.MonkeyPatch.context() as patch, suppress(Death):
            mortal = Mortal(patch, at, after=after)
            commit(run_log(store), stage(store, step=10, attempt=1))
        if not mortal.dead:
            break
        newest = check_invariants(store, {old.committed.prefix}).newest_committed
        assert newest is not None
        seen.add(newest.committed.step)
        log = run_log(store)
        commit(log, stage(store, step=10, attempt=claim(log)))
        check_invariants(store, {old.committed.prefix, f"runs/{RUN}/checkpoints/step-00000010-attempt-0002"})
    record_property("cases", at)
    assert seen == {5, 10}
    assert at > 30


@pytest.mark.linux  # /proc tells a file descriptor of a folder from one of a file
def test_create_promises_nothing_before_file_and_folders_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        synced.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")

    monkeypatch.setattr(os, "fsync", recorded)
    store = LocalStore(tmp_path)
    store.create("a/b/c", b"x")
    assert synced == ["folder", "folder", "folder", "file", "folder"]  # the root is there, but is its name on disk?
    synced.clear()
    store.create("a/b/d", b"x")
    assert synced == ["file", "folder"]
