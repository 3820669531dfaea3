"""How much memory a process used, how much it may use, and whether the kernel killed for it.

Owns the reading of /proc and of control groups (cgroup v2 `memory.events` and `memory.max`, v1 `memory.oom_control` and
`memory.limit_in_bytes`; sources: Linux admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, proc(5)). Refuses to judge.
Whatever the system does not tell is None or 0, never an error: evidence must not hide what it was to explain.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/")
_V2_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
_V1_MOUNT = "sys/fs/cgroup/memory"
_COUNTERS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_REUSABLE = ("inactive_file", "total_inactive_file")
"""Pages of files nobody has asked for lately, as cgroup v2 and v1 call them: the kernel takes them before it kills."""
_DYING_SECONDS = 30.0
"""A big process takes its time to die; a kill counted longer ago, while it lived on, was somebody else's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """The greatest resident sizes seen, added up, the tightest limit, and the kernel's kills in the group meanwhile."""

    rss_bytes: int | None = None
    limit_bytes: int | None = None
    oom_kills: int = 0


class MemoryWatch:
    """What one process and those it started use, from the first sample on; one thread samples, another may read."""

    def __init__(self, pid: int, *, root: Path = _ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with `pid`, whose control group's kills so far are not its own; `root` holds proc and sys."""
        self._pid, self._root, self._clock = pid, root, clock
        self._rss_bytes = dict[int, int]()
        self._limit_bytes: int | None = None
        self._counter: Path | None = None
        self._counted: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self.sample()

    def sample(self) -> None:
        """Look once; a process that is gone leaves what was seen before."""
        peaks = {pid: peak_rss_bytes(pid, root=self._root) for pid in (self._pid, *_children(self._pid, self._root))}
        limit, counter = memory_limit_bytes(self._pid, root=self._root), _counter(self._pid, self._root)
        with self._lock:
            for pid, used in peaks.items():
                if used is not None:
                    self._rss_bytes[pid] = max(self._rss_bytes.get(pid, 0), used)
            if peaks[self._pid] is not None:
                self._limit_bytes = limit
                self._count(counter)

    def reading(self) -> MemoryReading:
        """Return what is known; ask once the process has ended, so that its own kill is counted."""
        with self._lock:
            kills = _read_count(self._counter)
            self._forget(self._clock() - _DYING_SECONDS)
            before = self._counted[0][1] if self._counted else kills
            return MemoryReading(
                rss_bytes=sum(self._rss_bytes.values()) if self._rss_bytes else None,
                limit_bytes=self._limit_bytes,
                oom_kills=max(kills - before, 0),
            )

    def _count(self, counter: Path | None) -> None:
        if counter != self._counter:
            self._counter = counter
            self._counted.clear()
        now = self._clock()
        self._counted.append((now, _read_count(counter)))
        self._forget(now - _DYING_SECONDS)

    def _forget(self, before: float) -> None:
        # The newest count that is old enough is the one to compare with; those older than it tell nothing more.
        while len(self._counted) > 1 and self._counted[1][0] <= before:
            self._counted.popleft()


@contextmanager
def sampling(watch: MemoryWatch, *, every_seconds: float = 1.0) -> Iterator[None]:
    """Sample while the block runs, in a thread of its own."""
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(every_seconds):
            watch.sample()

    thread = threading.Thread(target=sample, name="memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def peak_rss_bytes(pid: int, *, root: Path = _ROOT) -> int | None:
    """Return the greatest resident size `pid` ever had; where the kernel does not keep it, its size now."""
    status = _text(root / "proc" / str(pid) / "status")
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if status:
        return None  # a zombie: it has no memory any more
    try:
        return int(psutil.Process(pid).memory_info().rss) if root == _ROOT else None
    except psutil.Error:
        return None


def memory_limit_bytes(pid: int, *, root: Path = _ROOT) -> int | None:
    """Return the tightest of its control groups' limits, its address space limit and the machine's memory."""
    limits = [_address_space_limit(pid, root), _physical_bytes(root)]
    for mount, folder in _control_groups(pid, root):
        for ancestor in (folder, *folder.parents):
            limits += [_number(_text(ancestor / name)) for name in _LIMITS]
            if ancestor == mount:
                break
    return min((limit for limit in limits if limit is not None), default=None)


def available_memory_bytes(pid: int, *, root: Path = _ROOT) -> int | None:
    """Return what a child of `pid` could take now: of the machine, and under the limit of each of its control groups.

    What a group uses already counts against its limit, pages of files the kernel would give up for it do not.
    """
    rooms = [_meminfo_bytes("MemAvailable:", root), _address_space_limit(pid, root)]
    for mount, folder in _control_groups(pid, root):
        for ancestor in (folder, *folder.parents):
            rooms += [_room(ancestor, name) for name in _LIMITS]
            if ancestor == mount:
                break
    return min((room for room in rooms if room is not None), default=None)


def oom_kill_count(pid: int, *, root: Path = _ROOT) -> int:
    """Return how many processes of the control group of `pid` the kernel has killed for memory since it was made."""
    return _read_count(_counter(pid, root))


def _children(pid: int, root: Path) -> list[int]:
    children = _text(root / "proc" / str(pid) / "task" / str(pid) / "children")
    return [int(child) for child in children.split()]


def _control_groups(pid: int, root: Path) -> list[tuple[Path, Path]]:
    """Mount point and folder of each control group of `pid` that can limit memory."""
    found = []
    for line in _text(root / "proc" / str(pid) / "cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            found.append(_inside(root / _V1_MOUNT, path))
        elif hierarchy == "0":
            found += [_inside(root / mount, path) for mount in _V2_MOUNTS]
    return found


def _inside(mount: Path, path: str) -> tuple[Path, Path]:
    # A container may see its own group as the mount itself, while the path still is the host's.
    folder = mount.joinpath(*PurePosixPath(path).parts[1:])
    return (mount, mount) if ".." in path or not folder.is_dir() else (mount, folder)


def _counter(pid: int, root: Path) -> Path | None:
    folders = [folder for _, folder in _control_groups(pid, root)]
    paths = [folder / name for folder in folders for name in _COUNTERS]
    return next((path for path in paths if "oom_kill " in _text(path)), None)


def _read_count(counter: Path | None) -> int:
    lines = _text(counter).splitlines() if counter is not None else []
    return next((_number(line.split()[1]) or 0 for line in lines if line.startswith("oom_kill ")), 0)


def _address_space_limit(pid: int, root: Path) -> int | None:
    limits = _text(root / "proc" / str(pid) / "limits").splitlines()
    line = next((line for line in limits if line.startswith("Max address space")), "")
    return _number(line.removeprefix("Max address space").partition("bytes")[0].split()[0]) if line else None


def _room(folder: Path, name: str) -> int | None:
    limit = _number(_text(folder / name))
    if limit is None:
        return None
    used = _number(_text(folder / _USED[name])) or 0
    fields = (line.split() for line in _text(folder / "memory.stat").splitlines())
    sizes = {words[0]: _number(words[1]) or 0 for words in fields if len(words) == 2}
    reusable = next((sizes[key] for key in reversed(_REUSABLE) if key in sizes), 0)
    return max(0, limit - max(0, used - reusable))


def _physical_bytes(root: Path) -> int | None:
    return _meminfo_bytes("MemTotal:", root)


def _meminfo_bytes(name: str, root: Path) -> int | None:
    lines = _text(root / "proc" / "meminfo").splitlines()
    total = next((line.split()[1] for line in lines if line.startswith(name)), "")
    kilobytes = _number(total)
    return None if kilobytes is None else kilobytes * 1024


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
