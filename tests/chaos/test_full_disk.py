"""A disk that is full, before a run and while text becomes a snapshot: said as what it is, and gone on with later."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.storage.errors import StorageError
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.snapshot_build import build_snapshot
from tests.crash.training_command import Command
from tests.memory_store import MemoryStore
from tests.processes.waiting import patience_seconds
from tests.programs.chaos.environment import fill, mount

TEXT = "\n\n".join(f"Stone {number} lies on stone {number * 7 % 997}." for number in range(20_000))
DATA = DataConfig(sources=("corpus.txt",), tokenizer="bytes")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of 48 MiB."""
    disk = tmp_path / "disk"
    if not mount(disk):
        pytest.skip("needs root and tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="module")
def whole_snapshot(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The id of the snapshot of that text."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "corpus.txt").write_text(TEXT)
    return build_snapshot(MemoryStore(), DATA, folder, cache_dir=folder / "cache").snapshot_id


@pytest.mark.parametrize("room_bytes", [0, 150_000, 1_000_000], ids=["none", "for a part", "for nearly all"])
def test_a_build_on_a_full_disk_says_so_and_goes_on_to_the_same_snapshot_when_there_is_room(
    tmp_path: Path, disk: Path, whole_snapshot: str, room_bytes: int
) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT)
    store = LocalStore(disk / "store")
    _fill(disk / "ballast", room_bytes)
    with pytest.raises((StorageError, OSError), match=r"No space left|full"):
        build_snapshot(store, DATA, tmp_path, cache_dir=disk / "cache")
    (disk / "ballast").unlink()
    assert build_snapshot(store, DATA, tmp_path, cache_dir=disk / "cache").snapshot_id == whole_snapshot


@pytest.mark.slow  # quick witness: the test above, for what a build says and leaves
def test_a_run_that_begins_on_a_full_disk_may_be_tried_again_and_is_no_misuse(tmp_path: Path, disk: Path) -> None:
    _fill(disk / "ballast", 0)
    command = Command(tmp_path, "", store=LocalStore(disk / "store"))
    assert command.start().wait(timeout=patience_seconds()) == 75, command.output()
    assert "the disk is full" in command.output() and "Traceback" not in command.output()


def _fill(ballast: Path, room_bytes: int) -> None:
    fill(ballast)
    with ballast.open("r+b") as file:
        file.truncate(ballast.stat().st_size - room_bytes)
