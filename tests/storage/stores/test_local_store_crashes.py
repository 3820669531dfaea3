"""Death between the operating system's calls inside one local operation: the object is whole or absent."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cairn.storage.stores.local_store import LocalStore
from tests.storage.builders import RUN, check_invariants, claim, commit, laid_out, run_log, stage
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


def deaths(
    folder: Path, operation: Callable[[LocalStore], object], *, before: Callable[[LocalStore], object], after: bool
) -> Iterator[LocalStore]:
    """Yield the store as a fresh reader finds it after death at each call of the operation in turn."""
    for at in count():
        store = LocalStore(folder / f"{after}-{at}")
        before(store)
        with pytest.MonkeyPatch.context() as patch, suppress(Death):
            mortal = Mortal(patch, at, after=after)
            operation(store)
        if not mortal.dead:
            return
        yield LocalStore(folder / f"{after}-{at}")


moments = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])


@moments
@pytest.mark.parametrize("old", [None, b"old"], ids=["new", "overwritten"])
@pytest.mark.parametrize(
    ("name", "operation"),
    [
        pytest.param("create", lambda store: store.create("a/b", b"whole"), id="create"),
        pytest.param("write", lambda store: store.write("a/b", b"whole"), id="write"),
        pytest.param("write", lambda store: store.write_stream("a/b", [b"wh", b"ole"]), id="write_stream"),
    ],
)
def test_death_at_any_system_call_leaves_the_object_whole_or_as_it_was(
    tmp_path: Path, name: str, operation: Callable[[LocalStore], object], old: bytes | None, after: bool
) -> None:
    found = list[bytes | None]()
    for reader in deaths(tmp_path, operation, before=lambda store: old and store.write("a/b", old), after=after):
        names = reader.keys("a")
        assert names in ([], ["a/b"]) and (reader.first("a") is None) == (names == [])
        found.append(reader.read("a/b") if names else None)
    assert set(found) == ({old} if old and name == "create" else {old, b"whole"})
    assert len(found) >= 4


def test_what_a_dead_writer_leaves_has_a_name_that_no_reader_sees(tmp_path: Path) -> None:
    left = list[str]()
    create: Callable[[LocalStore], object] = lambda store: store.create("a/b", b"whole")  # noqa: E731
    for reader in deaths(tmp_path, create, before=lambda store: None, after=True):
        left += [write.token[:3] for write in reader.unfinished("a")] if reader.first("a") is None else []
    assert ".b." in left


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(False, id="before"),
        pytest.param(True, id="after", marks=pytest.mark.slow),  # quick witness: it is before the next call
    ],
)
def test_death_at_any_system_call_of_a_commit_leaves_the_old_or_the_new_newest(
    tmp_path: Path, after: bool, record_property: Callable[[str, object], None]
) -> None:
    seen = list[int]()
    old, new = (f"runs/{RUN}/checkpoints/step-{name}" for name in ("00000005-attempt-0001", "00000010-attempt-0002"))

    def commit_10(store: LocalStore, attempt: int = 1) -> None:
        commit(run_log(store), stage(store, step=10, attempt=attempt))

    for store in deaths(tmp_path, commit_10, before=lambda store: laid_out(store, 5), after=after):
        newest = check_invariants(store, {old}).newest_committed
        assert newest is not None
        seen.append(newest.committed.step)
        commit_10(store, claim(run_log(store)))
        check_invariants(store, {old, new})
    record_property("cases", len(seen))
    assert set(seen) == {5, 10}
    assert len(seen) > 30


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
