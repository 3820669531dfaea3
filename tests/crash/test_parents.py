"""A parent that is killed at any moment of its children's start leaves no process, no socket and no folder behind."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cairn.storage.stores.child_process import start_child
from cairn.tasks.trainer.trainer_group import TrainerGroup
from tests.crash.training_command import RUN, Command, configuration
from tests.crash.victims import kill
from tests.processes.fork_server import ROOT
from tests.processes.waiting import prompt_seconds, wait_until

SUITE = """
[[evaluation.evaluators]]
name = "sleeper"
command = ["sh", "-c", "sleep 600"]
"""
PARSES = """
from cairn.storage.stores.child_process import bounded_process
with open(__file__, "rb") as file, bounded_process("tests.security.endless_parser", file=file, remedy="") as parsed:
    parsed.read()
""".replace("__file__", "'/dev/null'")
TRAINS = "import cairn, sys; cairn.train(sys.argv[1], run_id='r', store=sys.argv[2])"
LAUNCHES = """
import sys
from cairn.storage.stores.child_process import start_child
from cairn.tasks.trainer.trainer_group import TrainerGroup
start_child(TrainerGroup(processes=2).command()).wait()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """A kind of parent: its program and arguments, how long its children start, and the descendant that is killed."""

    words: tuple[str, ...]
    span_seconds: float
    victim: str = ""


def _cairn(*words: str) -> tuple[str, ...]:
    return ("-m", "cairn.cli.command", *words)


_EVALUATE = _cairn("evaluate", RUN, "--suite", "{suite}", "--store", "{settled}")
_TRAIN = ("train", "{config}", "--run-id", "r", "--store", "{folder}/store", "--set")
PARENTS: Mapping[str, Parent] = {
    "command of one process": Parent(words=_cairn(*_TRAIN, "training.processes=1"), span_seconds=4.0),
    "command of two ranks": Parent(words=_cairn(*_TRAIN, "training.processes=2"), span_seconds=7.0),
    "parent of a launcher": Parent(words=("-c", LAUNCHES), span_seconds=4.0),
    "launcher": Parent(words=("-c", LAUNCHES), span_seconds=4.0, victim="cairn.tasks.trainer.trainer_group"),
    "python interface": Parent(words=("-c", TRAINS, "{config}", "{folder}/store"), span_seconds=4.0),
    "evaluation": Parent(words=_EVALUATE, span_seconds=4.0),
    "evaluator": Parent(words=_EVALUATE, span_seconds=4.0, victim="cairn.tasks.evaluator.evaluator"),
    "replay": Parent(words=_cairn("replay", RUN, "--store", "{settled}"), span_seconds=5.0),
    "query": Parent(words=_cairn("sql", RUN, "select * from steps", "--store", "{settled}"), span_seconds=1.5),
    "parser": Parent(words=("-c", PARSES), span_seconds=1.0),
}


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes whose environment names the folder, which all that a parent starts inherit."""
    found, mark = [], os.fsencode(str(folder))
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes():  # a zombie has none
                found.append(psutil.Process(int(entry.name)))
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def left_of(folder: Path) -> list[str]:
    """Return the processes and temporary folders that a parent has left, each in words."""
    here = processes_of(folder)
    names = [name for name in os.listdir(folder / "tmp") if not name.endswith(".lock")]
    return [*(f"{one.pid}: {' '.join(one.cmdline())[-80:]}" for one in here if one.is_running()), *names]


class Killer:
    """Starts parents of one kind, each in a folder of its own, and kills each at its moment."""

    def __init__(self, parent: Parent, root: Path, settled: Path) -> None:
        """`settled` is the store of a run that has ended."""
        self._parent, self._root, self._settled = parent, root, settled
        self._suite, self._config = root / "suite.toml", root / "run.toml"
        self._suite.write_text(SUITE, encoding="utf-8")
        self._config.write_text(configuration(steps=6), encoding="utf-8")
        self.struck: list[Path] = []

    def strike(self, seconds: float) -> None:
        """Kill one parent, or its descendant, `seconds` after it was started."""
        folder = self._root / f"strike-{len(self.struck)}"
        (folder / "tmp").mkdir(parents=True)
        names = {"folder": folder, "config": self._config, "suite": self._suite, "settled": self._settled}
        words = [word if "\n" in word else word.format(**names) for word in self._parent.words]
        given = {"TMPDIR": str(folder / "tmp"), "CAIRN_CACHE": str(folder / "cache"), "PREFECT_API_URL": ""}
        given |= {"PYTHONPATH": str(ROOT)}
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *words], env={**os.environ, **given}, stdout=output, stderr=output, cwd=folder
            )
        self.struck.append(folder)
        try:
            if self._parent.victim:
                self._kill_descendant(process, seconds)
            else:
                time.sleep(seconds)
        finally:
            process.kill()
            process.wait()

    def _kill_descendant(self, process: "subprocess.Popen[bytes]", seconds: float) -> None:
        def find() -> list[psutil.Process]:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            return [child for child in below if self._parent.victim in _words(child)]

        wait_until(lambda: bool(find()) or process.poll() is not None, "the one to be killed")
        victims = find()
        time.sleep(seconds)
        for victim in victims:
            victim.kill()
        process.wait()

    def left(self) -> list[str]:
        """Return what is left of all of them ten seconds after the last was killed; later where starts take longer."""
        until = time.monotonic() + prompt_seconds() / 6
        while (left := [line for folder in self.struck for line in left_of(folder)]) and time.monotonic() < until:
            time.sleep(0.1)
        return left


def _words(process: psutil.Process) -> Sequence[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ()


def moments(kind: str, count: int) -> list[float]:
    """Return so many moments of a kind's start, one in each equal part of it, in an order of their own."""
    seeded, span = random.Random(kind), PARENTS[kind].span_seconds
    found = [(number + seeded.random()) * span / count for number in range(count)]
    seeded.shuffle(found)
    return found


MOMENTS = int(os.environ.get("CAIRN_TEST_MOMENTS", "200"))


@pytest.mark.parametrize(
    "kind",
    [
        "parent of a launcher",
        pytest.param("launcher", marks=pytest.mark.slow),  # quick witness: a rank that is stopped while it imports
        "parser",
    ],
)
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
