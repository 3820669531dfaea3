"""Real runs on a real disk, a tmpfs, that is full: they wait for a sweep, or end as storage, and go on once it is not.

The quick witnesses are `tests/storage/stores/test_full_store.py` and `tests/wiring/test_short_room.py`.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.storage.checkpoints.checkpoint import verify_checkpoint
from cairn.storage.stores.local_store import LocalStore
from tests.crash.training_command import Command
from tests.processes.waiting import patience_seconds, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.linux, pytest.mark.timeout(1200)]
WIDE = ("--set", "model.n_layer=2", "--set", "model.n_embd=64")  # its checkpoints fill the disk, not its log
SHORT = ("--set", "training.steps=30", "--set", "checkpoint.patience_seconds=5", *WIDE)
LATE = ("--set", "evaluation.every_commits=1", "--set", "checkpoint.keep_last=1", "--set", "checkpoint.keep_best=0")


class SmallDisk:
    """A tmpfs, whose size can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def leave(self, free_bytes: int) -> None:
        """Leave so many bytes free from now on."""
        wait_until(lambda: self._has_left(free_bytes), "a size that nothing outgrew meanwhile")

    def _has_left(self, free_bytes: int) -> bool:
        size = shutil.disk_usage(self.folder).used + free_bytes
        return subprocess.run(["mount", "-o", f"remount,size={size}", self.folder], check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or subprocess.run(["mount", "-t", "tmpfs", "none", folder]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield SmallDisk(folder)
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def command(disk: SmallDisk, tmp_path: Path, api_url: str) -> Command:
    return Command(tmp_path, api_url, store=LocalStore(disk.folder / "store"))


@pytest.fixture(scope="module")
def undisturbed_sha256(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> str:
    command = Command(tmp_path_factory.mktemp("short"), api_url)
    command.train(*SHORT)
    return command.state_sha256()


def test_a_disk_that_stays_full_ends_the_run_as_storage_each_time_and_the_same_command_goes_on_once_it_is_not(
    command: Command, disk: SmallDisk, undisturbed_sha256: str
) -> None:
    process = command.train_until(12, *SHORT)
    disk.leave(0)
    command.let_go("pause@12")
    assert process.wait(timeout=patience_seconds()) == 75, command.output()
    command.train(*SHORT, exit_code=75)
    assert command.reasons() == ["storage"] * 2
    assert "Traceback" not in command.output() and "the disk is full; free space" in command.output()
    disk.leave(1 << 30)
    command.train(*SHORT)
    assert command.state_sha256() == undisturbed_sha256


def test_a_run_with_less_room_than_its_evaluator_is_late_waits_for_it_and_comes_to_its_end(
    command: Command, disk: SmallDisk, undisturbed_sha256: str
) -> None:
    process = command.train_until(7, *SHORT, *LATE, "--set", "checkpoint.patience_seconds=120")
    wait_until(lambda: bool(command.state().readable), "the first commit")
    (first,) = command.state().readable
    disk.leave(int(2.5 * first.committed.bytes))
    command.let_go("pause@7")
    assert process.wait(timeout=patience_seconds()) == 0, command.output()
    state = command.state()
    assert command.state_sha256() == undisturbed_sha256 and len(state.attempts) == 1
    assert [verify_checkpoint(command.store, record.committed) for record in state.readable] == [()]
