"""A disk that is full at each of many moments of a run: it ends as storage, and once there is room with the same bits.

Real commands: tests/crash/test_full_disk.py; each write of a checkpoint: tests/storage/stores/test_full_store.py.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cairn.storage.errors import StoreFull
from tests.log_judge import judge_store
from tests.wiring.flow_in_process import FlowWorld, answer_for_evaluators

pytestmark = [pytest.mark.slow, pytest.mark.linux, pytest.mark.timeout(7200)]
MOMENTS = int(os.environ.get("CAIRN_TEST_MOMENTS", "200"))
SETTINGS = ("checkpoint.every_steps=5", "checkpoint.keep_last=2", "checkpoint.patience_seconds=0.5")
PAGE_BYTES = 4096


class SmallWorld(FlowWorld):
    """A world whose store is a disk of its own: a tmpfs of so many bytes."""

    def __init__(self, folder: Path, size: int) -> None:
        (folder / "store").mkdir(parents=True)
        self._disk = folder / "store"
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", self._disk], check=True)
        super().__init__(folder)

    def used_bytes(self) -> int:
        return shutil.disk_usage(self._disk).used

    def grow(self) -> None:
        subprocess.run(["mount", "-o", "remount,size=64m", self._disk], check=True)

    def end(self) -> None:
        subprocess.run(["umount", "-l", self._disk], check=True)

    def digest(self) -> str:
        finished = self.log.state.finished
        assert finished is not None
        return finished.state_sha256

    def is_complete(self) -> bool:
        """Train; return whether the run was completed, and fail unless it otherwise ended for want of room."""
        try:
            state = self.train(*SETTINGS)
        except StoreFull:
            return False
        assert state.is_completed() or str(state.message).startswith("storage: "), state.message
        return state.is_completed()


@pytest.fixture
def small_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], SmallWorld]]:
    made = list[SmallWorld]()

    def make(size: int) -> SmallWorld:
        made.append(SmallWorld(tmp_path / str(len(made)), size))
        answer_for_evaluators(monkeypatch, made[-1])
        return made[-1]

    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("needs root and tmpfs")
    yield make
    for world in made:
        world.end()


def test_a_disk_that_is_full_at_any_moment_of_a_run_ends_it_as_storage_and_it_goes_on_to_the_same_bits(
    small_world: Callable[[int], SmallWorld],
) -> None:
    whole = small_world(64 << 20)
    assert whole.is_complete()
    pages, ended = whole.used_bytes() // PAGE_BYTES, 0
    for number in range(MOMENTS):
        world = small_world((1 + pages * number // MOMENTS) * PAGE_BYTES)
        if not world.is_complete():
            ended += 1
            world.grow()
            assert world.is_complete(), f"moment {number}"
        assert world.digest() == whole.digest(), f"moment {number}"
        judge_store(world.store)
    assert ended > MOMENTS // 4
