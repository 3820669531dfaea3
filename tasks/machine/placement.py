"""This process and machine: placement, versions, cores, work folder, own check, and whether another process is dead.

The work folder holds caches, spools and the trainers' stderr; it can be deleted at any time.
"""

import getpass
import os
import platform
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.storage.logs import run_entries, run_log
from cairn.storage.stores.codec import sha256
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.text.format import one_line

if TYPE_CHECKING:
    from cairn.tasks.configuration.settings import MachinesConfig

CAIRN_VERSION = "0.1.0"
_PROC = Path("/proc")
_SHOWN_CHARACTERS = 160


@cache
def boot_id() -> str:
    """Return an identity of this boot of this machine."""
    path = _PROC / "sys/kernel/random/boot_id"
    if path.exists():
        return path.read_text(encoding="ascii").strip()
    import psutil

    return f"booted-{psutil.boot_time():.0f}"


def pid_namespace() -> str:
    """Return the namespace in which this process's pid counts; empty if it cannot be read, which matches no other."""
    if not _PROC.is_dir():
        return "one"  # this system has no namespaces
    with suppress(OSError):
        return os.readlink(_PROC / "self/ns/pid")
    return ""


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity where the system has one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def code_version() -> str:
    """Return `version+commit`, with `unknown` as the commit outside of a checkout of Cairn's own."""
    root, commit = Path(__file__).parents[2], "unknown"
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    with suppress(OSError, subprocess.CalledProcessError):
        if (root / ".git").exists():  # else installed: a folder further up may be somebody's checkout of something else
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return f"{CAIRN_VERSION}+{commit}"


def library_versions() -> dict[str, str]:
    """Return the versions of python, torch, prefect, cairn and, where there is one, the GPU's driver."""
    libraries = {name: _installed_version(name) for name in ("torch", "prefect")}
    versions = {"python": platform.python_version(), **libraries, "cairn": CAIRN_VERSION}
    with suppress(OSError):
        driver = (_PROC / "driver/nvidia/version").read_text(encoding="ascii", errors="replace")
        versions["nvidia-driver"] = driver.partition("\n")[0].removeprefix("NVRM version: ").strip()
    return versions


@cache
def _installed_version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def resolved_device(wanted: str, *, on_cuda: bool, processes: int) -> str:
    """Return the device that `training.device` comes to here: cpu, cuda:<number>, or cuda for several processes."""
    if wanted not in ("auto", "cuda"):
        return wanted
    if not on_cuda:
        return "cpu"
    return "cuda" if processes > 1 else "cuda:0"


def this_placement(*, device: str, threads: int, world_size: int = 1) -> run_entries.Placement:
    """Return where this process runs; `start_ticks` is 0 on a system without /proc."""
    found = _state_and_start_ticks("self")
    return run_entries.Placement(
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        pid=os.getpid(),
        start_ticks=found[1] if found else 0,
        device=device,
        world_size=world_size,
        threads=threads,
    )


def shares_pids(placement: run_entries.Placement) -> bool:
    """Whether the placement's pid names the same process here: same host, boot and pid namespace."""
    here = (socket.gethostname(), boot_id(), pid_namespace())
    return bool(placement.pid_namespace) and (placement.host, placement.boot_id, placement.pid_namespace) == here


def is_known_dead(placement: run_entries.Placement) -> bool:
    """Whether the process no longer exists: its pid counts here, and no process has this pid and start time.

    A zombie is dead. False means unknown, not alive: another pid namespace, a process that /proc hides, or, on a system
    without /proc, any process that has the pid now.
    """
    if not shares_pids(placement):
        return False
    try:
        os.kill(placement.pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    with suppress(OSError):
        if os.readlink(_PROC / "self") != str(os.getpid()):
            return False  # this /proc is of another pid namespace
    found = _state_and_start_ticks(placement.pid)
    return found is not None and (found[0] in "ZX" or found[1] != placement.start_ticks)


def is_known_alive(placement: run_entries.Placement) -> bool:
    """Whether the process exists: its pid counts here, and /proc shows it with its start time. False means unknown."""
    found = _state_and_start_ticks(placement.pid) if shares_pids(placement) else None
    return found is not None and found[0] not in "ZX" and found[1] == placement.start_ticks


def check_machine(rules: "MachinesConfig") -> str:
    """Run `machines.check`, never of a log, as long as machines are waited for; return why this one does not join."""
    if not rules.check:
        return ""
    try:
        command, limit = shlex.split(rules.check), rules.wait_seconds
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=limit, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"machines.check of {socket.gethostname()} failed: {error}"
    said = one_line(f"{done.stdout}{done.stderr}".strip()[-_SHOWN_CHARACTERS:], _SHOWN_CHARACTERS)
    return f"machines.check of {socket.gethostname()} left with {done.returncode}: {said}" if done.returncode else ""


def work_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder: `CAIRN_CACHE`, else `XDG_CACHE_HOME/cairn`, else `~/.cache/cairn`.

    A user whose home is missing or cannot be written has a folder of this user's among the temporary ones.
    """
    if chosen := environment.get("CAIRN_CACHE"):
        try:
            Path(chosen).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidConfiguration(f"CAIRN_CACHE={chosen}: {error}; set it to a folder of your own") from error
        return Path(chosen)
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "cairn"
    with suppress(OSError):
        if not base.startswith("~"):  # else this user has no home that is known
            folder.mkdir(parents=True, exist_ok=True)  # tried: in some file systems root may not write either
            if os.access(folder, os.W_OK):
                return folder
    temporary = Path(tempfile.gettempdir()) / f"cairn-{os.getuid()}"
    temporary.mkdir(mode=0o700, exist_ok=True)
    if temporary.stat().st_uid != os.getuid():
        raise InvalidConfiguration(f"{temporary} belongs to another user; set CAIRN_CACHE to a folder of your own")
    return temporary


def this_person() -> str:
    """Return user and host, for the record."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a container's user may have no name
        return f"uid {os.getuid()}@{socket.gethostname()}"


def trainer_folder(environment: Mapping[str, str], log: run_log.RunLog) -> Path:
    """Return the folder of spools and stderr of this opening of a run in this store, or of trainers before it."""
    identity = sha256(f"{log.store.url} {log.run_id} {log.state.opening}".encode())[:12]
    return work_folder(environment) / "work" / (f"{log.run_id}-{identity}" if log.state.opening else "waiting")


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file atomically; a folder that cannot be written is ignored."""
    beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(content)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def _state_and_start_ticks(pid: int | str) -> tuple[str, int] | None:
    """Return a process's state and start (clock ticks since the boot; proc(5), stat), or None if it is not shown."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    state, *after = stat.rpartition(b")")[2].split()  # the name in brackets may hold anything
    return state.decode(), int(after[18])
