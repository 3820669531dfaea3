"""This process and machine: placement, code version, cores, and whether another process is alive."""

import os
import socket
import subprocess
from functools import cache
from pathlib import Path

import psutil

from storage.logs.run_entries import Placement


@cache
def boot_id() -> str:
    """Return an identity of this boot of this machine."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="ascii").strip() if path.exists() else f"booted-{psutil.boot_time():.0f}"


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity where the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def code_version() -> str:
    """Return `version+commit`, with `unknown` as the commit outside of a git checkout."""
    from importlib.metadata import version

    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return f"{version('cairn')}+{commit}"


def this_placement(*, device: str, threads: int, world_size: int = 1) -> Placement:
    """Return where this process runs."""
    process = psutil.Process()
    return Placement(
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=process.pid,
        process_started=process.create_time(),
        device=device,
        world_size=world_size,
        threads=threads,
    )


def is_known_dead(placement: Placement) -> bool:
    """Whether the process certainly no longer exists: same host and boot, and no process with its pid and start time.

    False means unknown, not alive.
    """
    if placement.host != socket.gethostname() or placement.boot_id != boot_id():
        return False
    try:
        process = psutil.Process(placement.pid)
        return bool(process.create_time() != placement.process_started) or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
