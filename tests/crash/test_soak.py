"""A thousand segments in one go: what a run holds and what a segment costs are at the end what they were before."""

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from cairn.storage.logs.run_log import RunLog
from tests.crash.training_command import Command
from tests.crash.victims import trainers_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.xdist_group("soak")]

SEGMENTS = 1_000
_LOOK_SECONDS = 0.5
_MIB = 1024 * 1024
_GROWTH_BYTES = 32 * _MIB
"""What allocators and Prefect's bounded queues may add after the first fifth. Kept train states would be 360 MB."""
_SLOWER = 1.3
_MOST_OBJECTS = 120
"""A checkpoint is four objects. Kept are the newest two, the best and what is being evaluated; beside that come those
that the sweep, which runs beside training and is never waited for, has not reached yet. Without retention: 4,000."""
_BUSY = 2.0
"""Threads for each core from which on a clock says more about others than about this run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What is held at one moment: bytes and descriptors of parent and child, objects of the store besides the log.

    Core seconds are those spent until then; `load` is how many threads of the whole machine wanted a core.
    """

    segments: int
    parent_bytes: int
    child_bytes: int
    parent_files: int
    child_files: int
    parent_core_seconds: float
    child_core_seconds: float
    objects: int
    load: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Soak:
    """The run that was looked at all the time, and how long each of its segments took."""

    looks: tuple[Look, ...]
    segment_seconds: tuple[float, ...]
    entries: int

    def fifths(self, of: Callable[[Look], float]) -> tuple[float, ...]:
        """Return the median of each fifth of the segments."""
        bounds = [SEGMENTS * number // 5 for number in range(6)]
        return tuple(
            statistics.median(of(look) for look in self.looks if first < look.segments <= last)
            for first, last in pairwise(bounds)
        )

    def core_seconds(self, of: Callable[[Look], float]) -> tuple[float, ...]:
        """Return what a segment of each fifth took of a core; evaluations are in it, one each fifth."""
        looks = [look for look in self.looks if look.segments < SEGMENTS]  # the last one may be of another child
        bounds = [next(look for look in looks if look.segments > SEGMENTS * n // 5) for n in range(5)]
        return tuple(
            (of(later) - of(earlier)) / (later.segments - earlier.segments)
            for earlier, later in pairwise([*bounds, looks[-1]])
        )

    @property
    def seconds_by_fifth(self) -> tuple[float, ...]:
        """Return the median time of a segment in each fifth."""
        size = len(self.segment_seconds) // 5
        return tuple(statistics.median(self.segment_seconds[size * n : size * (n + 1)]) for n in range(5))


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> Soak:
    """A run with a commit after each step, retention on, and an evaluation now and then."""
    command = Command(tmp_path_factory.mktemp("soak"), api_url)
    settings = (
        f"training.steps={SEGMENTS}",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=2",
        f"evaluation.every_commits={SEGMENTS // 5}",
    )
    process = command.start(*(word for setting in settings for word in ("--set", setting)))
    looks = looked_at(command, process)
    assert process.wait() == 0, command.output()
    done = Soak(looks=tuple(looks), segment_seconds=_segment_seconds(command), entries=len(_log_names(command)))
    print(f"\n{told(done)}")
    return done


def looked_at(command: Command, process: "subprocess.Popen[bytes]") -> list[Look]:
    """Look at the run until its command has left."""
    looks, parent, log = list[Look](), psutil.Process(process.pid), RunLog(command.store, "bard")
    while process.poll() is None:
        time.sleep(_LOOK_SECONDS)
        try:
            (child,) = trainers_of(process)
            looks.append(
                Look(
                    segments=len(log.refresh().checkpoints),
                    parent_bytes=parent.memory_full_info().pss,
                    child_bytes=child.memory_full_info().pss,
                    parent_files=parent.num_fds(),
                    child_files=child.num_fds(),
                    parent_core_seconds=sum(parent.cpu_times()[:2]),
                    child_core_seconds=sum(child.cpu_times()[:2]),
                    objects=_objects(command.folder / "store"),
                    load=os.getloadavg()[0],
                )
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError):  # not there yet, or not any more
            continue
    return looks


def told(soak: Soak) -> str:
    """Return the numbers, as BENCHMARKS.md has them."""
    rows = {
        "parent MiB": [f"{value / _MIB:.0f}" for value in soak.fifths(lambda look: look.parent_bytes)],
        "child MiB": [f"{value / _MIB:.0f}" for value in soak.fifths(lambda look: look.child_bytes)],
        "parent descriptors": [f"{value:.0f}" for value in soak.fifths(lambda look: look.parent_files)],
        "child descriptors": [f"{value:.0f}" for value in soak.fifths(lambda look: look.child_files)],
        "objects beside the log": [f"{value:.0f}" for value in soak.fifths(lambda look: look.objects)],
        "parent's core ms a segment": [f"{v * 1e3:.0f}" for v in soak.core_seconds(lambda k: k.parent_core_seconds)],
        "child's core ms a segment": [f"{v * 1e3:.0f}" for v in soak.core_seconds(lambda k: k.child_core_seconds)],
        "seconds a segment": [f"{value:.3f}" for value in soak.seconds_by_fifth],
    }
    slope = f"slope {slope_of(soak.segment_seconds) * 1e6:+.0f} µs a segment each segment; {soak.entries} log entries"
    return "\n".join([*(f"| {name} | {' | '.join(values)} |" for name, values in rows.items()), slope])


def slope_of(values: tuple[float, ...]) -> float:
    """Return how much a value grows from one to the next: the median over pairs half the run apart (Theil and Sen)."""
    half = len(values) // 2
    return statistics.median((values[n + half] - values[n]) / half for n in range(len(values) - half))


@pytest.mark.parametrize("of", ["parent_bytes", "child_bytes"])
def test_memory_is_flat_once_everything_has_been_done_once(soak: Soak, of: str) -> None:
    first, *_, last = soak.fifths(lambda look: getattr(look, of))
    assert last - first < _GROWTH_BYTES, told(soak)


@pytest.mark.parametrize("of", ["parent_files", "child_files"])
def test_file_descriptors_are_flat(soak: Soak, of: str) -> None:
    first, *_, last = soak.fifths(lambda look: getattr(look, of))
    assert last <= first + 2, told(soak)


def test_the_store_holds_no_more_objects_however_long_the_run_but_for_its_log(soak: Soak) -> None:
    assert max(look.objects for look in soak.looks) < _MOST_OBJECTS, told(soak)


def test_the_log_has_a_bounded_number_of_entries_for_each_segment(soak: Soak) -> None:
    assert soak.entries < 4 * SEGMENTS, "a commit, its superseding, its deletion, and now and then something else"


@pytest.mark.parametrize("of", ["parent_core_seconds", "child_core_seconds"])
def test_a_segment_takes_as_much_of_a_core_at_the_end_as_at_the_start(soak: Soak, of: str) -> None:
    first, *_, last = soak.core_seconds(lambda look: getattr(look, of))
    assert last < _SLOWER * first, told(soak)


def test_a_segment_takes_as_long_at_the_end_as_at_the_start(soak: Soak) -> None:
    if max(look.load for look in soak.looks) > _BUSY * (os.cpu_count() or 1):
        pytest.skip("the machine is busy with other things; the time on a core is judged alone")
    first, *_, last = soak.seconds_by_fifth
    assert last < _SLOWER * first, told(soak)
    assert slope_of(soak.segment_seconds) * SEGMENTS < (_SLOWER - 1) * first, told(soak)


def _segment_seconds(command: Command) -> tuple[float, ...]:
    entries = RunLog(command.store, "bard").read_entries()
    times = [_at(entry.at) for entry in entries if entry.kind == "checkpoint-committed"]
    assert len(times) == SEGMENTS
    return tuple(later - earlier for earlier, later in pairwise(times))


def _at(when: datetime | str) -> float:
    return (when if isinstance(when, datetime) else datetime.fromisoformat(when)).timestamp()


def _log_names(command: Command) -> list[str]:
    return os.listdir(command.folder / "store" / "runs" / "bard" / "log")


def _objects(root: Path) -> int:
    return sum(len(names) for folder, _, names in os.walk(root) if not folder.endswith("/log"))
