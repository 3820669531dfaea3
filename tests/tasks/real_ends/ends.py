"""The parent's side of every end: a real process, a real cause, and the evidence that was there to be had."""

import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cairn.storage.errors import Fenced, StoreUnavailable
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.attempt.preemption_notice import kubernetes_reason
from cairn.tasks.attempt.watchdog import HangDetector, HeartbeatGap, detecting_hangs
from cairn.tasks.configuration.settings import WatchdogConfig
from cairn.tasks.machine.process_memory import MemoryWatch
from cairn.tasks.policy.failures import Evidence, ExceptionReport
from cairn.tasks.trainer.machines import Machines
from cairn.tasks.trainer.trainer_process import tail_of
from cairn.tasks.trainer.trainer_protocol import decode_message
from tests.memory_store import MemoryStore
from tests.processes.fork_server import fork_server
from tests.storage.builders import claim, commit, run_log, run_with_commits, stage

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_SECONDS = 240
LISTENER = """
import sys, time
from cairn.tasks.attempt.shutdown_signal import ShutdownSignal
notice = ShutdownSignal()
with notice.listening(extra_signal=sys.argv[1]):
    print("ready", flush=True)
    while notice.signal is None:
        time.sleep(0.02)
print(notice.signal, notice.detail, sep="|", flush=True)
"""
HOG = "import sys; print('ready', flush=True); sys.stdin.readline(); full = [b'1' * (1 << 20) for _ in range(512)]"
SLEEPER = "import signal; print('ready', flush=True); signal.pause()"
TALKER = "import signal, time\nfor _ in range(8): print('step', flush=True); time.sleep(0.01)\nsignal.pause()"
NULL_POINTER = "import ctypes; ctypes.string_at(0)"
BAD_ALLOC = """
import ctypes
new = ctypes.CDLL("libstdc++.so.6")._Znwm
new.argtypes = [ctypes.c_size_t]
new(1 << 62)
"""


def play_scenes(folder: Path, names: list[str]) -> dict[str, Evidence]:
    """Play scenes of a trainer that speaks and return the evidence each left."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.tasks.real_ends.scenes", str(folder), *names]
    with fork_server().forking():
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True, timeout=DEADLINE_SECONDS)
    kinds = [name.partition("=")[0] for name in names]
    return {kind: _left_behind(folder / kind) for kind in kinds}


def _left_behind(scene: Path) -> Evidence:
    words = None
    for line in scene.with_suffix(".stdout").read_bytes().splitlines():
        event = decode_message(line)
        if isinstance(event, ExceptionReport):
            words = event
    code = int(scene.with_suffix(".exit").read_text())
    return Evidence(exit_code=code, last_words=words, stderr_tail=tail_of(scene.with_suffix(".stderr")))


@contextmanager
def running(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command until the block ends, its stderr in a file of `folder`."""
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ended_by_itself(code: str, folder: Path, *flags: str) -> Evidence:
    """Run Python code to its end."""
    with running(folder, sys.executable, *flags, "-c", code) as process:
        exit_code = process.wait(DEADLINE_SECONDS)
    return Evidence(exit_code=exit_code, stderr_tail=tail_of(folder / "stderr"))


def sent(number: signal.Signals, folder: Path) -> Evidence:
    """Send a process that does nothing a signal."""
    with running(folder, sys.executable, "-c", SLEEPER) as process:
        assert _heard(process) == "ready"
        process.send_signal(number)
        exit_code = process.wait(DEADLINE_SECONDS)
    return Evidence(exit_code=exit_code, stderr_tail=tail_of(folder / "stderr"))


def killed_in_a_shell(folder: Path) -> Evidence:
    """Kill what a shell runs; the shell tells it in its own way."""
    with running(folder, "sh", "-c", "sh -c 'kill -9 $$'; exit $?") as process:
        return Evidence(exit_code=process.wait(DEADLINE_SECONDS))


def killed_at(memory_share: float, folder: Path) -> Evidence:
    """Kill a process from outside whose limit is what it uses, divided by `memory_share`."""
    with running(folder, sys.executable, "-c", SLEEPER) as process:
        assert _heard(process) == "ready"
        reading = MemoryWatch(process.pid).reading()
        process.kill()
        exit_code = process.wait(DEADLINE_SECONDS)
    if reading.rss_bytes is None:
        pytest.skip("this system does not tell how much a process uses")
    limit = int(reading.rss_bytes / memory_share)
    return Evidence(exit_code=exit_code, rss_bytes=reading.rss_bytes, memory_limit_bytes=limit)


def notified(number: signal.Signals, folder: Path) -> Evidence:
    """Send a signal to a process that hears notices; it says what it heard and leaves as a preempted flow does."""
    extra = number.name if number in (signal.SIGUSR1, signal.SIGUSR2) else ""
    with running(folder, sys.executable, "-c", LISTENER, extra) as process:
        assert _heard(process) == "ready", tail_of(folder / "stderr")
        process.send_signal(number)
        name, _, detail = _heard(process).partition("|")
        exit_code = process.wait(DEADLINE_SECONDS)
    return Evidence(exit_code=exit_code, stop_signal=name, notice=detail)


def notified_with_too_little_grace(folder: Path) -> Evidence:
    """Give notice to a process that does not listen, and kill it when the grace period is over."""
    return replace(sent(signal.SIGKILL, folder), stop_signal="SIGTERM", grace_ended=True)


def silent(folder: Path) -> Evidence:
    """Have a watchdog kill a child that spoke eight times and then never again."""
    silences: list[HeartbeatGap] = []
    watch = HangDetector(WatchdogConfig(factor=10.0, floor_seconds=0.5, startup_seconds=DEADLINE_SECONDS))
    with running(folder, sys.executable, "-c", TALKER) as process:
        assert process.stdout is not None

        def kill(silence: HeartbeatGap) -> None:
            silences.append(silence)
            process.kill()

        with detecting_hangs(watch, kill, poll_seconds=0.05):
            for _ in process.stdout:
                watch.record_heartbeat()
            exit_code = process.wait(DEADLINE_SECONDS)
    (silence,) = silences
    return Evidence(
        exit_code=exit_code,
        silent_seconds=silence.seconds,
        allowed_seconds=silence.allowed_seconds,
        heartbeat_step=8,
    )


@contextmanager
def _small_group(limit_bytes: int) -> Iterator[Path]:
    """A control group of its own with a memory limit, or a skip that says why there is none."""
    name = f"cairn-{uuid.uuid4().hex[:8]}"
    lines = Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else []
    own = {line.split(":")[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
    v1 = [Path("/sys/fs/cgroup/memory") / own[names] / name for names in own if "memory" in names.split(",")]
    v2 = Path("/sys/fs/cgroup") / own.get("", "") / name
    group, limit = (v1[0], "memory.limit_in_bytes") if v1 else (v2, "memory.max")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / limit).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no control group with a memory limit can be made here: {error}")
        with suppress(OSError):
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


def killed_by_the_kernel(folder: Path) -> Evidence:
    """Let a child use more memory than its control group may have."""
    with _small_group(64 << 20) as group, running(folder, sys.executable, "-c", HOG) as process:
        assert _heard(process) == "ready"
        try:
            (group / "cgroup.procs").write_text(str(process.pid))
        except OSError as error:
            pytest.skip(f"no process can be moved to another control group here: {error}")
        watch = MemoryWatch(process.pid)
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        exit_code = process.wait(DEADLINE_SECONDS)
        reading = watch.reading()
    return Evidence(
        exit_code=exit_code,
        oom_kills=reading.oom_kills,
        rss_bytes=reading.rss_bytes,
        memory_limit_bytes=reading.limit_bytes,
        stderr_tail=tail_of(folder / "stderr"),
    )


def beside_somebody_the_kernel_killed(folder: Path) -> Evidence:
    """A crash of its own while the kernel killed another process of the same control group."""
    kills = killed_by_the_kernel(folder).oom_kills
    return replace(ended_by_itself(NULL_POINTER, folder), oom_kills=kills)


def ended_by_kubernetes(told: str, folder: Path) -> Evidence:
    """A container that was killed, and a successor with the file of what Kubernetes called it."""
    path = folder / "ended-pods"
    path.write_text(f"bard-0 {told}\n", encoding="utf-8")
    reason = kubernetes_reason({"CAIRN_ENDED_PODS": str(path)}, "bard-0")
    return replace(sent(signal.SIGKILL, folder), kubernetes_reason=reason)


def fenced(folder: Path) -> Evidence:
    """A commit of attempt 1 after attempt 2 has claimed the run."""
    store = MemoryStore()
    log = run_with_commits(store, 5)
    late = stage(store, step=10, attempt=1)
    claim(log)
    with pytest.raises(Fenced) as raised:
        commit(run_log(store), late)
    return Evidence(fenced=str(raised.value))


def without_machines(folder: Path) -> Evidence:
    """A first machine whose others do not come."""
    here = Machines(3).gather(0.01, is_stopping=lambda: False)
    return Evidence(too_few_machines=f"{here} of 3 machines were here after 0 s")


def store_out_of_reach(folder: Path) -> Evidence:
    """A parent that cannot write its log: a file stands where the store's folder was."""
    (folder / "store").touch()
    with pytest.raises(StoreUnavailable) as raised:
        LocalStore(folder / "store").create("runs/a/log/1.json", b"{}")
    return Evidence(store_error=str(raised.value))


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of one megabyte, or None where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Where a row of the table gets its evidence from: scenes played once for all rows, or a process of its own."""

    played: dict[str, Evidence]
    folder: Path

    def scene(self, name: str) -> Evidence:
        """Return what a scene left, or skip where it could not be played here."""
        if name not in self.played:
            pytest.skip(f"the scene {name} cannot be played here: it needs the right to mount a small disk")
        return self.played[name]


Produce = Callable[[Stage], Evidence]


def scene(name: str) -> Produce:
    """Evidence of a trainer that spoke."""
    return lambda stage: stage.scene(name)


def alone(produce: Callable[..., Evidence], *arguments: object) -> Produce:
    """Evidence of a process that is started for this row."""
    return lambda stage: produce(*arguments, stage.folder)


def on_cuda(stage: Stage) -> Evidence:
    """Evidence of a trainer that asked an accelerator for more than it has."""
    return play_scenes(stage.folder / "cuda", ["cuda-allocator"])["cuda-allocator"]
