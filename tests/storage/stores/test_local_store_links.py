"""Symbolic links, pipes and permissions below a store's root: nothing is read or written out of it, nothing hangs."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import entry_name
from cairn.storage.logs.step_log import StepLog
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import UnfinishedWrite
from tests.storage.builders import LOG, entry_log, run_with_commits
from tests.storage.store_operations import OPERATIONS

READS = [
    *("read", "read_range", "read_chunks", "size", "sizes", "age_seconds"),
    *("keys", "folders", "first", "unfinished", "local_path"),
]
WRITES = ["create", "write", "write_stream", "delete", "delete_all", "discard"]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the store with something worth stealing in it."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "b").write_bytes(b"secret")
    (folder / ".b.0123").write_bytes(b"half")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """An empty store, its folder made."""
    (tmp_path / "store" / "a").mkdir(parents=True)
    return LocalStore(tmp_path / "store")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_operation_is_tried() -> None:
    assert {*READS, *WRITES} == set(OPERATIONS)


@pytest.mark.parametrize("operation", [*READS, *WRITES])
def test_a_linked_folder_leads_no_operation_out_of_the_store(
    store: LocalStore, tmp_path: Path, outside: Path, operation: str
) -> None:
    (tmp_path / "store" / "linked").symlink_to(outside)
    (tmp_path / "store" / "a" / "up").symlink_to("../../outside")
    before = contents(outside)
    for folder in ("linked", "a/up"):
        key = folder if operation in ("keys", "sizes", "folders", "first", "unfinished") else f"{folder}/b"
        with pytest.raises(IntegrityError, match="link"):
            OPERATIONS[operation](store, key)
    assert contents(outside) == before


@pytest.mark.parametrize("operation", ["read", "read_chunks", "size", "local_path"])
def test_a_linked_object_is_not_read(store: LocalStore, tmp_path: Path, outside: Path, operation: str) -> None:
    (tmp_path / "store" / "a" / "b").symlink_to(outside / "b")
    with pytest.raises(IntegrityError, match="a link leads out of the store"):
        OPERATIONS[operation](store, "a/b")


@pytest.mark.parametrize("target", ["there", "dangling"])
def test_writing_replaces_a_link_and_never_what_it_points_at(
    store: LocalStore, tmp_path: Path, outside: Path, target: str
) -> None:
    link = tmp_path / "store" / "a" / "b"
    link.symlink_to(outside / ("b" if target == "there" else "new"))
    assert store.create("a/b", b"mine") is False
    store.write("a/b", b"mine")
    assert (link.is_symlink(), store.read("a/b"), sorted(contents(outside))) == (False, b"mine", [".b.0123", "b"])
    assert (outside / "b").read_bytes() == b"secret"


def test_deleting_takes_the_link_and_never_what_it_points_at(store: LocalStore, tmp_path: Path, outside: Path) -> None:
    (tmp_path / "store" / "a" / "b").symlink_to(outside / "b")
    store.delete("a/b")
    assert (outside / "b").read_bytes() == b"secret" and not (tmp_path / "store" / "a" / "b").is_symlink()


def test_a_link_that_stays_inside_is_read_and_never_written_through(store: LocalStore, tmp_path: Path) -> None:
    store.write("a/b", b"1")
    (tmp_path / "store" / "c").symlink_to("a")
    assert (store.read("c/b"), store.size("c/b")) == (b"1", 1)
    with pytest.raises(IntegrityError, match="nothing is written through one"):
        store.write("c/b", b"2")
    with pytest.raises(IntegrityError, match="nothing is written through one"):
        store.delete("c/b")
    assert store.read("a/b") == b"1"


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to("disk")
    store = LocalStore(tmp_path / "store")
    run_with_commits(store, 5)
    assert store.first("runs/r1/log") is not None and (tmp_path / "disk" / "runs").is_dir()


def test_step_records_are_not_appended_through_a_link(store: LocalStore, tmp_path: Path, outside: Path) -> None:
    steps = tmp_path / "store" / "runs" / "r1" / "steps"
    steps.mkdir(parents=True)
    (steps / "attempt-0001.jsonl").symlink_to(outside / "b")
    with pytest.raises((IntegrityError, OSError), match=r"link"):
        StepLog(store, "runs/r1", 1, spool_dir=tmp_path)
    (steps / "attempt-0002.jsonl").symlink_to("../../../a/other")  # inside, and still not itself
    with pytest.raises(OSError, match="symbolic link"):
        StepLog(store, "runs/r1", 2, spool_dir=tmp_path)
    assert (outside / "b").read_bytes() == b"secret"


def test_a_sweep_discards_no_temporary_file_behind_a_link(store: LocalStore, tmp_path: Path, outside: Path) -> None:
    (tmp_path / "store" / "linked").symlink_to(outside)
    with pytest.raises(IntegrityError, match="link"):
        store.discard(UnfinishedWrite(key="linked/b", bytes=4, age_seconds=1e9, token=".b.0123"))
    assert store.unfinished("a") == [] and (outside / ".b.0123").exists()


def make_zeros(path: Path) -> None:
    """Make a device of endless zeros, as /dev/zero is."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), make_zeros],
    ids=["pipe", "socket", "device"],
)
@pytest.mark.timeout(20)
def test_what_is_no_ordinary_file_is_refused_at_once(
    store: LocalStore, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "store" / "a" / "b")
    with pytest.raises(Exception, match=r"is not a regular file|cannot read"):
        store.read("a/b")
    assert store.size("a/b") is None


@pytest.fixture(params=[0o022, 0o077, 0o000], ids=["022", "077", "000"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_store_gives_nobody_more_than_its_user_wishes(tmp_path: Path, umask: int) -> None:
    run_with_commits(LocalStore(tmp_path / "store"), 5)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").rglob("*")}
    assert {path: oct(mode) for path, mode in modes.items() if mode & (umask | stat.S_IWOTH)} == {}


@pytest.mark.unsound_log
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("what", ["link", "pipe"])
@pytest.mark.timeout(20)
def test_an_entry_of_a_log_that_is_no_ordinary_file_is_refused(tmp_path: Path, place: int, what: str) -> None:
    store = LocalStore(tmp_path / "store")
    run_with_commits(store, 5)
    key = f"{LOG}/{entry_name(place)}"
    path = store.local_path(key)
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved") if what == "link" else os.mkfifo(path)
    with pytest.raises(IntegrityError, match=r"a link leads out of the store|is not a regular file"):
        list(entry_log(store).read_after(None))
