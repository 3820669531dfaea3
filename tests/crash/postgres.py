"""A real Postgres server of a test's own, on a free port of the loopback; as root it runs as somebody else."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.deployments.started_up import free_port
from tests.processes.waiting import patience_seconds, wait_for

_PROGRAMS = ("initdb", "postgres", "pg_isready")
_NO_CARE = ("-c", "fsync=off", "-c", "unix_socket_directories=", "-c", "listen_addresses=127.0.0.1")
"""The machine will not lose its power, and nobody needs a socket."""


def missing_program() -> str:
    """Return the name of a program that is not on this machine, or nothing."""
    return next((name for name in _PROGRAMS if not _program(name)), "")


@contextmanager
def postgres() -> Iterator[str]:
    """Start a server; yield the address that Prefect's server takes."""
    folder, user = Path(tempfile.mkdtemp(prefix="cairn-postgres-")), _user()
    try:
        if user is not None:
            shutil.chown(folder, user)
        data, port = folder / "data", free_port()
        made = [_program("initdb"), "-D", str(data), "-A", "trust", "-U", "cairn", "-E", "UTF8", "--no-locale", "-N"]
        subprocess.run(made, cwd=folder, user=user, capture_output=True, check=True, timeout=patience_seconds())
        with (folder / "server.txt").open("wb") as output:
            server = subprocess.Popen(
                [_program("postgres"), "-D", str(data), "-p", str(port), *_NO_CARE],
                cwd=folder, user=user, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            asked = [_program("pg_isready"), "-h", "127.0.0.1", "-p", str(port), "-q"]
            wait_for(lambda: subprocess.run(asked, check=False).returncode == 0, server, "an answer of Postgres")
            yield f"postgresql+asyncpg://cairn@127.0.0.1:{port}/postgres"
        finally:
            with suppress(ProcessLookupError):
                server.send_signal(signal.SIGQUIT)
            server.wait(timeout=patience_seconds())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _program(name: str) -> str:
    if found := shutil.which(name):
        return found
    folder = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False).stdout.strip()
    return shutil.which(name, path=folder) or ""


def _user() -> str | None:
    """Return who runs it: Postgres refuses root."""
    if os.geteuid() != 0:
        return None
    with suppress(KeyError):
        return pwd.getpwnam("postgres").pw_name
    return "nobody"
