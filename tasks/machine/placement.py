"""Who this process is, and whether another process of this machine is still alive.

Owns host, boot and process identity. A pid alone proves nothing: it is compared with the process's start time.
"""

import os
import socket
from functools import cache
from pathlib import Path

import psutil

from storage.logs.run_entries import Placement

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def boot_id() -> str:
    """Return an identity of this boot of this machine."""
    if _BOOT_ID.exists():
        return _BOOT_ID.read_text().strip()
    return f"booted-{psutil.boot_time():.0f}"


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity where the system knows one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    """Whether the owner certainly exists no more: same host and boot, and its process is gone.

    False means "not known", never "alive".
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
