"""Memory of a process: peak use, limits, and the kernel's OOM kills.

Sources: Linux admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst, proc(5). A value that cannot be read is None or 0.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from cairn.tasks.machine.process_scopes import running_beside

_ROOT = Path("/")
_LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""Limit → the use that counts against it."""
_REUSABLE = ("total_inactive_file", "inactive_file")
"""File pages not used lately, in cgroup v1 and v2; the kernel reclaims them before it kills."""
_DYING_SECONDS = 30.0
"""A large process dies slowly; a kill that was counted longer before its end was another process's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """The sum of the peak resident sizes, the tightest limit, and the kernel's kills in the group since the start."""

    rss_bytes: int | None = None
    limit_bytes: int | None = None
    oom_kills: int = 0


class MemoryWatch:
    """Samples the memory of one process and its children; thread-safe."""

    def __init__(self, pid: int, *, root: Path = _ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with `pid`; earlier kills in its control group are not counted. `root` contains proc and sys."""
        self._pid, self._root, self._clock = pid, root, clock
        self._rss_bytes = dict[int, int]()
        self._limit_bytes: int | None = None
        self._counter: Path | None = None
        self._counted: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self.sample()

    def sample(self) -> None:
        """Take one sample; a process that has ended keeps its last values."""
        children = _text(self._root / "proc" / str(self._pid) / "task" / str(self._pid) / "children").split()
        peaks = {pid: peak_rss_bytes(pid, root=self._root) for pid in (self._pid, *map(int, children))}
        limit, groups = memory_limit_bytes(self._pid, root=self._root), _control_groups(self._pid, self._root)
        counts = [folder / name for _, folder in groups for name in ("memory.events", "memory.oom_control")]
        counter = next((path for path in counts if "oom_kill " in _text(path)), None)
        with self._lock:
            for pid, used in peaks.items():
                if used is not None:
                    self._rss_bytes[pid] = max(self._rss_bytes.get(pid, 0), used)
            if peaks[self._pid] is not None:
                self._limit_bytes = limit
                if counter != self._counter:
                    self._counter = counter
                    self._counted.clear()
                self._counted.append((self._clock(), self._count()))
                self._forget_old_counts()

    def reading(self) -> MemoryReading:
        """Return the totals; call it after the process has ended, so that its own kill is counted."""
        with self._lock:
            kills = self._count()
            self._forget_old_counts()
            before = self._counted[0][1] if self._counted else kills
            used = sum(self._rss_bytes.values()) if self._rss_bytes else None
            return MemoryReading(rss_bytes=used, limit_bytes=self._limit_bytes, oom_kills=max(kills - before, 0))

    def _count(self) -> int:
        return (_number(self._counter, "oom_kill ") or 0) if self._counter else 0

    def _forget_old_counts(self) -> None:
        # The newest count that is old enough is the baseline; older ones are not needed.
        before = self._clock() - _DYING_SECONDS
        while len(self._counted) > 1 and self._counted[1][0] <= before:
            self._counted.popleft()


def sampling(watch: MemoryWatch, *, every_seconds: float = 1.0) -> AbstractContextManager[None]:
    """Sample in a background thread while the block runs."""

    def sample(stop: threading.Event) -> None:
        while not stop.wait(every_seconds):
            watch.sample()

    return running_beside(sample, name="memory")


def peak_rss_bytes(pid: int, *, root: Path = _ROOT) -> int | None:
    """Return the peak resident size of `pid`, or its present size where the kernel keeps no peak."""
    status = root / "proc" / str(pid) / "status"
    if _text(status):  # without the line: a zombie has no memory
        return _number(status, "VmHWM:", unit_bytes=1024)
    try:
        return int(psutil.Process(pid).memory_info().rss) if root == _ROOT else None
    except psutil.Error:
        return None


def memory_limit_bytes(pid: int, *, root: Path = _ROOT) -> int | None:
    """Return the smallest of the control groups' limits, the address space limit and the machine's memory."""
    limits = [_number(root / f"proc/{pid}/limits", "Max address space")]
    limits.append(_number(root / "proc/meminfo", "MemTotal:", unit_bytes=1024))
    limits += [_number(folder / name) for folder in _group_folders(pid, root) for name in _LIMITS]
    return min((limit for limit in limits if limit is not None), default=None)


def available_memory_bytes(pid: int, *, root: Path = _ROOT) -> int | None:
    """Return the memory left for a child of `pid` in machine and control groups; reclaimable pages are free."""
    rooms = [_number(root / f"proc/{pid}/limits", "Max address space")]
    rooms.append(_number(root / "proc/meminfo", "MemAvailable:", unit_bytes=1024))
    for folder in _group_folders(pid, root):
        for limit, use in _LIMITS.items():
            if (most := _number(folder / limit)) is not None:
                found = (_number(folder / "memory.stat", f"{name} ") for name in _REUSABLE)
                reusable = next((size for size in found if size is not None), 0)
                rooms.append(max(0, most - max(0, (_number(folder / use) or 0) - reusable)))
    return min((room for room in rooms if room is not None), default=None)


def _control_groups(pid: int, root: Path) -> list[tuple[Path, Path]]:
    """Mount point and folder of each control group that can limit the memory of `pid`."""
    found = []
    for line in _text(root / "proc" / str(pid) / "cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            found.append(_inside(root / "sys/fs/cgroup/memory", path))
        elif hierarchy == "0":
            found += [_inside(root / mount, path) for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified")]
    return found


def _group_folders(pid: int, root: Path) -> Iterator[Path]:
    """The folders of the control groups of `pid` and of their ancestors, up to the mount points."""
    for mount, folder in _control_groups(pid, root):
        yield folder
        yield from (ancestor for ancestor in folder.parents if ancestor.is_relative_to(mount))


def _inside(mount: Path, path: str) -> tuple[Path, Path]:
    # In a container the mount itself may be its group, while the path is still the host's.
    folder = mount.joinpath(*PurePosixPath(path).parts[1:])
    return (mount, mount) if ".." in path or not folder.is_dir() else (mount, folder)


def _number(path: Path, beginning: str = "", unit_bytes: int = 1) -> int | None:
    """Return the number after the beginning of a line; None without such a line, or for another word there."""
    lines = (line.removeprefix(beginning).split() for line in _text(path).splitlines() if line.startswith(beginning))
    word = next((words[0] for words in lines if words), "")
    return int(word) * unit_bytes if word.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
