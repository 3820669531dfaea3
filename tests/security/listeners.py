"""What a process and its descendants listen on, and whether what answers HTTP asks for a password."""

import http.client
import ipaddress
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import psutil

_ACCEPTS = 0x10000
"""The flag of a unix socket that waits for connections (include/uapi/linux/net.h)."""
_SECONDS = 20.0


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its living descendants."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def tcp_listeners(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Return address and port of each socket on which one of the processes waits for connections."""
    connections = [connection for process in processes for connection in process.net_connections(kind="inet")]
    return {(item.laddr.ip, item.laddr.port) for item in connections if item.status == psutil.CONN_LISTEN}


def unix_listeners(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the paths of unix sockets on which one of the processes waits; an abstract one begins with `@`."""
    held = {target for process in processes for target in _descriptors(process.pid)}
    rows = [line.split() for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]]
    return {(row[7:] or ["@"])[0] for row in rows if int(row[3], 16) & _ACCEPTS and f"socket:[{row[6]}]" in held}


def is_for_this_user_alone(path: str) -> bool:
    """Whether a unix socket lies in a folder that only its owner may enter."""
    return path.startswith("/") and not stat.S_IMODE(Path(path).parent.stat().st_mode) & 0o077


def open_to_others(pid: int) -> list[str]:
    """Return every listener of a process and its descendants that somebody else could use."""
    processes = family(pid)
    tcp = sorted(tcp_listeners(processes))
    beyond = [f"{ip}:{port}" for ip, port in tcp if not ipaddress.ip_address(ip).is_loopback]
    shared = [path for path in sorted(unix_listeners(processes)) if not is_for_this_user_alone(path)]
    return beyond + shared + [f"http {ip}:{port}" for ip, port in tcp if not is_password_asked(port)]


def is_password_asked(port: int) -> bool:
    """Whether a port of the loopback refuses a stranger's HTTP request; true of what does not speak HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    try:
        connection.request("GET", "/api/admin/version")
        return connection.getresponse().status in (401, 403)
    except (http.client.HTTPException, OSError):
        return True
    finally:
        connection.close()


def _descriptors(pid: int) -> list[str]:
    """Return what the descriptors of a process are; one that has ended has none."""
    try:
        return [os.readlink(item.path) for item in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return []
