"""A thousand segments in one go: what a run holds and what a segment costs are at the end what they were before."""

import os
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from cairn.storage.logs.run_log import RunLog
from tests.crash.training_command import Command
from tests.crash.victims import trainers_of
from tests.programs.benchmarks.own_process import set_options

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.xdist_group("soak")]

SEGMENTS = 1_000
_LOOK_SECONDS = 0.5
_MIB = 1024 * 1024
_GROWTH_MIB = 32
"""What allocators and Prefect's bounded queues may add after the first fifth. Kept train states would be 360 MB."""
_SLOWER = 1.3
_MOST_OBJECTS = 120
"""A checkpoint is four objects. Kept are the newest two, the best and what is being evaluated; beside that come those
that the sweep, which runs beside training and is never waited for, has not reached yet. Without retention: 4,000."""
_BUSY = 2.0
"""Threads for each core from which on a clock says more about others than about this run."""
OBJECTS, LOAD, CORE = "objects beside the log", "load", "core seconds"


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What is held at one moment, each by its name, and what has been spent of a core until then."""

    segments: int
    held: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Soak:
    """The run that was looked at all the time, and how long each of its segments took."""

    looks: tuple[Look, ...]
    segment_seconds: tuple[float, ...]
    entries: int

    def fifths(self, name: str) -> tuple[float, ...]:
        """Return the median of what is held in each fifth of the segments."""
        bounds = [SEGMENTS * number // 5 for number in range(6)]
        return tuple(
            statistics.median(look.held[name] for look in self.looks if first < look.segments <= last)
            for first, last in pairwise(bounds)
        )

    def core_seconds(self, who: str) -> tuple[float, ...]:
        """Return what a segment of each fifth took of a core; evaluations are in it, one each fifth."""
        looks = [look for look in self.looks if look.segments < SEGMENTS]  # the last one may be of another child
        bounds = [next(look for look in looks if look.segments > SEGMENTS * n // 5) for n in range(5)]
        return tuple(
            (later.held[f"{who} {CORE}"] - earlier.held[f"{who} {CORE}"]) / (later.segments - earlier.segments)
            for earlier, later in pairwise([*bounds, looks[-1]])
        )

    def most(self, name: str) -> float:
        """Return the most that was ever held."""
        return max(look.held[name] for look in self.looks)

    @property
    def seconds_by_fifth(self) -> tuple[float, ...]:
        """Return the median time of a segment in each fifth."""
        size = len(self.segment_seconds) // 5
        return tuple(statistics.median(self.segment_seconds[size * n : size * (n + 1)]) for n in range(5))


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> Soak:
    """A run with a commit after each step, retention on, and an evaluation now and then."""
    command = Command(tmp_path_factory.mktemp("soak"), api_url)
    retention = ("checkpoint.every_steps=1", "checkpoint.keep_last=2")
    settings = (f"training.steps={SEGMENTS}", *retention, f"evaluation.every_commits={SEGMENTS // 5}")
    process = command.start(*set_options(settings))
    looks = looked_at(command, process)
    assert process.wait() == 0, command.output()
    entries = RunLog(command.store, "bard").read_entries()
    times = [entry.at.timestamp() for entry in entries if entry.kind == "checkpoint-committed"]
    assert len(times) == SEGMENTS
    seconds = tuple(later - earlier for earlier, later in pairwise(times))
    done = Soak(looks=tuple(looks), segment_seconds=seconds, entries=len(entries))
    print(f"\n{told(done)}")
    return done


def looked_at(command: Command, process: "subprocess.Popen[bytes]") -> list[Look]:
    """Look at the run until its command has left."""
    looks, parent, log = list[Look](), psutil.Process(process.pid), RunLog(command.store, "bard")
    while process.poll() is None:
        time.sleep(_LOOK_SECONDS)
        try:
            (child,) = trainers_of(process)
            held = {OBJECTS: float(_objects(command.folder / "store")), LOAD: os.getloadavg()[0]}
            for who, seen in (("parent", parent), ("child", child)):
                held[f"{who} MiB"] = seen.memory_full_info().pss / _MIB
                held[f"{who} descriptors"] = float(seen.num_fds())
                held[f"{who} {CORE}"] = sum(seen.cpu_times()[:2])
            looks.append(Look(segments=len(log.refresh().checkpoints), held=held))
        except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError):  # not there yet, or not any more
            continue
    return looks


def told(soak: Soak) -> str:
    """Return the numbers, as BENCHMARKS.md has them."""
    names = [name for name in soak.looks[0].held if not name.endswith((CORE, LOAD))]
    rows = {name: [f"{value:.0f}" for value in soak.fifths(name)] for name in names}
    for who in ("parent", "child"):
        rows[f"{who}'s core ms a segment"] = [f"{value * 1e3:.0f}" for value in soak.core_seconds(who)]
    rows["seconds a segment"] = [f"{value:.3f}" for value in soak.seconds_by_fifth]
    slope = f"slope {slope_of(soak.segment_seconds) * 1e6:+.0f} µs a segment each segment; {soak.entries} log entries"
    return "\n".join([*(f"| {name} | {' | '.join(values)} |" for name, values in rows.items()), slope])


def slope_of(values: tuple[float, ...]) -> float:
    """Return how much a value grows from one to the next: the median over pairs half the run apart (Theil and Sen)."""
    half = len(values) // 2
    return statistics.median((values[n + half] - values[n]) / half for n in range(len(values) - half))


@pytest.mark.parametrize("who", ["parent", "child"])
def test_memory_is_flat_once_everything_has_been_done_once(soak: Soak, who: str) -> None:
    first, *_, last = soak.fifths(f"{who} MiB")
    assert last - first < _GROWTH_MIB, told(soak)


@pytest.mark.parametrize("who", ["parent", "child"])
def test_file_descriptors_are_flat(soak: Soak, who: str) -> None:
    first, *_, last = soak.fifths(f"{who} descriptors")
    assert last <= first + 2, told(soak)


def test_the_store_holds_no_more_objects_however_long_the_run_but_for_its_log(soak: Soak) -> None:
    assert soak.most(OBJECTS) < _MOST_OBJECTS, told(soak)


def test_the_log_has_a_bounded_number_of_entries_for_each_segment(soak: Soak) -> None:
    assert soak.entries < 4 * SEGMENTS, "a commit, its superseding, its deletion, and now and then something else"


@pytest.mark.parametrize("who", ["parent", "child"])
def test_a_segment_takes_as_much_of_a_core_at_the_end_as_at_the_start(soak: Soak, who: str) -> None:
    first, *_, last = soak.core_seconds(who)
    assert last < _SLOWER * first, told(soak)


def test_a_segment_takes_as_long_at_the_end_as_at_the_start(soak: Soak) -> None:
    if soak.most(LOAD) > _BUSY * (os.cpu_count() or 1):
        pytest.skip("the machine is busy with other things; the time on a core is judged alone")
    first, *_, last = soak.seconds_by_fifth
    assert last < _SLOWER * first, told(soak)
    assert slope_of(soak.segment_seconds) * SEGMENTS < (_SLOWER - 1) * first, told(soak)


def _objects(root: Path) -> int:
    return sum(len(names) for folder, _, names in os.walk(root) if not folder.endswith("/log"))
