"""Control groups and /proc as files of a folder, and this very process as the system tells it."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cairn.tasks.attempt.preemption_notice import kubernetes_reason
from cairn.tasks.machine.process_memory import (
    MemoryReading,
    MemoryWatch,
    available_memory_bytes,
    memory_limit_bytes,
    peak_rss_bytes,
    sampling,
)

PID = 42
GIB = 1 << 30


class Machine:
    """A root folder with the files a kernel would show."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 0.0

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def clock(self) -> float:
        return self.now

    def process(self, *, peak_kib: int, group: str) -> None:
        self.write(f"proc/{PID}/status", f"Name:\tpython\nVmHWM:\t{peak_kib} kB\nVmRSS:\t1 kB\n")
        self.write(f"proc/{PID}/cgroup", group)

    def kills(self, count: int) -> None:
        self.write("sys/fs/cgroup/job/memory.events", f"low 0\nmax 7\noom 9\noom_kill {count}\noom_group_kill 0\n")

    def watch(self) -> MemoryWatch:
        return MemoryWatch(PID, root=self.root, clock=self.clock)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A process of 1 MiB in a group of cgroup v2 that has seen two kills."""
    machine = Machine(tmp_path)
    machine.process(peak_kib=1024, group="0::/job\n")
    machine.kills(2)
    return machine


def test_kills_before_the_watch_are_not_counted(machine: Machine) -> None:
    assert machine.watch().reading() == MemoryReading(rss_bytes=1024 * 1024, limit_bytes=None, oom_kills=0)


def test_a_kill_at_the_end_is_counted_though_the_process_is_gone(machine: Machine) -> None:
    watch = machine.watch()
    machine.kills(3)
    (machine.root / f"proc/{PID}/status").unlink()
    (machine.root / f"proc/{PID}/cgroup").unlink()
    watch.sample()
    assert watch.reading().oom_kills == 1


def test_a_kill_the_process_outlived_was_somebody_elses(machine: Machine) -> None:
    watch = machine.watch()
    machine.now = 100.0
    machine.kills(3)
    watch.sample()
    machine.now = 200.0
    watch.sample()
    assert watch.reading().oom_kills == 0


def test_a_process_that_takes_its_time_to_die_was_killed_all_the_same(machine: Machine) -> None:
    watch = machine.watch()
    for second in range(100, 125):
        machine.now = float(second)
        machine.kills(2 if second < 105 else 3)
        watch.sample()
    assert watch.reading().oom_kills == 1


def test_a_process_moved_to_another_group_starts_from_that_groups_count(machine: Machine) -> None:
    watch = machine.watch()
    machine.process(peak_kib=1024, group="0::/other\n")
    machine.write("sys/fs/cgroup/other/memory.events", "oom_kill 70\n")
    watch.sample()
    machine.write("sys/fs/cgroup/other/memory.events", "oom_kill 71\n")
    assert watch.reading().oom_kills == 1


def test_the_greatest_size_seen_is_kept(machine: Machine) -> None:
    watch = machine.watch()
    for peak_kib in (4096, 2048):
        machine.process(peak_kib=peak_kib, group="0::/job\n")
        watch.sample()
    assert watch.reading().rss_bytes == 4096 * 1024


def test_the_old_hierarchy_is_read_as_well(machine: Machine) -> None:
    machine.process(peak_kib=1, group="5:cpu,cpuacct:/x\n4:memory:/slurm/job\n0::/\n")
    machine.write("sys/fs/cgroup/memory/slurm/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    machine.write("sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes", f"{GIB}\n")
    watch = machine.watch()
    machine.write("sys/fs/cgroup/memory/slurm/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    assert watch.reading() == MemoryReading(rss_bytes=1024, limit_bytes=GIB, oom_kills=2)


@pytest.mark.parametrize("path", ["/docker/abc", "/../outside"], ids=["host-path", "outside-the-namespace"])
def test_a_container_that_sees_its_group_as_the_mount_reads_it_there(machine: Machine, path: str) -> None:
    machine.process(peak_kib=1, group=f"0::{path}\n")
    machine.write("sys/fs/cgroup/memory.events", "oom_kill 6\n")
    machine.write("sys/fs/cgroup/memory.max", f"{GIB}\n")
    watch = machine.watch()
    machine.write("sys/fs/cgroup/memory.events", "oom_kill 9\n")
    assert watch.reading() == MemoryReading(rss_bytes=1024, limit_bytes=GIB, oom_kills=3)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sys/fs/cgroup/job/memory.max", f"{GIB}\n"),
        ("sys/fs/cgroup/memory.max", f"{GIB}\n"),
        (f"proc/{PID}/limits", f"Max address space         {GIB}           {4 * GIB}           bytes\n"),
        ("proc/meminfo", f"MemTotal:       {GIB // 1024} kB\nMemFree: 1 kB\n"),
    ],
    ids=["own-group", "group-above", "address-space", "machine"],
)
def test_the_tightest_limit_counts(machine: Machine, path: str, text: str) -> None:
    machine.write("sys/fs/cgroup/job/memory.max", "max\n")
    machine.write("sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    machine.write(f"proc/{PID}/limits", "Max address space         unlimited            unlimited            bytes\n")
    machine.write("proc/meminfo", f"MemTotal:       {16 * GIB // 1024} kB\n")
    machine.write(path, text)
    assert memory_limit_bytes(PID, root=machine.root) == GIB


def test_where_the_system_tells_nothing_nothing_is_known_and_nothing_fails(tmp_path: Path) -> None:
    watch = MemoryWatch(PID, root=tmp_path / "absent")
    watch.sample()
    assert watch.reading() == MemoryReading(rss_bytes=None, limit_bytes=None, oom_kills=0)


def test_files_that_hold_nonsense_are_as_good_as_none(machine: Machine) -> None:
    for path in ("sys/fs/cgroup/job/memory.events", "sys/fs/cgroup/job/memory.max", "proc/meminfo"):
        machine.write(path, "\udcff what\n\n".encode("utf-8", "surrogateescape").decode("latin-1"))
    assert machine.watch().reading() == MemoryReading(rss_bytes=1024 * 1024, limit_bytes=None, oom_kills=0)


def test_a_real_child_is_measured_while_it_lives_and_remembered_after() -> None:
    code = "import sys; block = bytearray(64 << 20); print('full', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    watch = MemoryWatch(child.pid)
    with sampling(watch, every_seconds=3600):
        child.stdout.readline()
        watch.sample()
        child.communicate()
    reading = watch.reading()
    assert reading.rss_bytes is not None and reading.rss_bytes > 64 << 20
    assert reading.oom_kills == 0


def test_this_process_uses_less_than_its_limit() -> None:
    used, limit = peak_rss_bytes(os.getpid()), memory_limit_bytes(os.getpid())
    assert used is not None and used >= psutil.Process().memory_info().rss // 2
    assert limit is None or used < limit


def test_a_process_that_never_was_has_no_size() -> None:
    assert peak_rss_bytes(2**31 - 1) is None


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("bard-0 OOMKilled\nbard-1 Evicted\n", "OOMKilled"),
        ("bard-0 OOMKilled\nbard-0 Evicted\n", "Evicted"),
        ("bard-1 OOMKilled\nbard-0\n\n", ""),
    ],
    ids=["among others", "the newest", "of others only"],
)
def test_the_reason_of_kubernetes_is_that_of_the_hosts_newest_pod(tmp_path: Path, lines: str, reason: str) -> None:
    path = tmp_path / "ended-pods"
    path.write_text(lines, encoding="utf-8")
    assert kubernetes_reason({"CAIRN_ENDED_PODS": str(path)}, "bard-0") == reason


@pytest.mark.parametrize("environment", [{}, {"CAIRN_ENDED_PODS": "/no/such/file"}])
def test_outside_of_kubernetes_there_is_no_reason(environment: dict[str, str]) -> None:
    assert kubernetes_reason(environment, "bard-0") == ""


def test_what_is_available_is_the_least_room_of_machine_and_control_groups(machine: Machine) -> None:
    machine.write("proc/meminfo", f"MemTotal: {9 * GIB // 1024} kB\nMemAvailable: {5 * GIB // 1024} kB\n")
    assert available_memory_bytes(PID, root=machine.root) == 5 * GIB
    machine.write("sys/fs/cgroup/job/memory.max", f"{4 * GIB}\n")
    machine.write("sys/fs/cgroup/job/memory.current", f"{3 * GIB}\n")
    assert available_memory_bytes(PID, root=machine.root) == GIB
    machine.write("sys/fs/cgroup/job/memory.stat", f"anon 7\ninactive_file {GIB}\n")
    assert available_memory_bytes(PID, root=machine.root) == 2 * GIB


def test_a_group_of_cgroup_v1_leaves_what_its_processes_do_not_use(machine: Machine) -> None:
    machine.process(peak_kib=1024, group="4:memory:/job\n")
    folder = "sys/fs/cgroup/memory/job"
    machine.write(f"{folder}/memory.limit_in_bytes", f"{4 * GIB}\n")
    machine.write(f"{folder}/memory.usage_in_bytes", f"{3 * GIB}\n")
    machine.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n")
    assert available_memory_bytes(PID, root=machine.root) == 3 * GIB


def test_a_group_over_its_limit_leaves_nothing(machine: Machine) -> None:
    machine.write("sys/fs/cgroup/job/memory.max", "5\n")
    machine.write("sys/fs/cgroup/job/memory.current", "7\n")
    assert available_memory_bytes(PID, root=machine.root) == 0


def test_this_very_process_could_take_less_than_the_machine_has() -> None:
    available, limit = available_memory_bytes(os.getpid()), memory_limit_bytes(os.getpid())
    assert available is not None and limit is not None and 0 < available < limit
