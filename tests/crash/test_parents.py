"""A parent that is killed at any moment of its children's start leaves no process, no socket and no folder behind."""

import os
import shutil
from pathlib import Path

import psutil
import pytest

from cairn.storage.stores.child_process import start_child
from cairn.tasks.trainer.trainer_group import TrainerGroup
from tests.crash.parents import PARENTS, Killer, moments
from tests.crash.training_command import Command
from tests.crash.victims import kill
from tests.processes.waiting import prompt_seconds, wait_until

MOMENTS = int(os.environ.get("CAIRN_TEST_MOMENTS", "200"))
QUICK = ("parent of a launcher", "launcher", "parser")


@pytest.mark.parametrize("kind", QUICK)
def test_a_parent_killed_while_its_children_start_leaves_nothing(kind: str, tmp_path: Path) -> None:
    killer = Killer(PARENTS[kind], tmp_path, tmp_path)
    for seconds in (0.2, 1.0):
        killer.strike(seconds)
    assert killer.left() == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", PARENTS)
def test_a_parent_killed_at_any_moment_of_its_childrens_start_leaves_nothing(
    kind: str, tmp_path: Path, undisturbed: Command
) -> None:
    settled = shutil.copytree(undisturbed.folder / "store", tmp_path / "settled")
    killer = Killer(PARENTS[kind], tmp_path, settled)
    for seconds in moments(kind, MOMENTS):
        killer.strike(seconds)
    assert killer.left() == []


def test_a_rank_that_is_stopped_while_it_imports_does_not_outlive_its_launcher() -> None:
    launcher, stopped = start_child(TrainerGroup(processes=2).command()), list[psutil.Process]()
    known = psutil.Process(launcher.pid)

    def ranks() -> list[psutil.Process]:
        try:
            return [
                child
                for child in known.children()
                if "cairn.tasks.trainer.trainer" in child.cmdline() and child.num_threads() > 1
            ]
        except psutil.Error:  # it becomes its program just now
            return []

    try:
        wait_until(lambda: len(ranks()) == 2, "ranks that watch their parent")
        stopped += ranks()
        for rank in stopped:
            rank.suspend()
        launcher.kill()
        assert psutil.wait_procs(stopped, timeout=prompt_seconds())[1] == []
    finally:
        for process in (launcher, *stopped):
            kill(process.pid)
        launcher.communicate()
