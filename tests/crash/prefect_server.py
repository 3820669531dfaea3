"""A real Prefect server on a free port of the loopback, started, stopped and killed from outside."""

import atexit
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from cairn.flows.orchestrator.prefect_settings import prefect_home
from tests.processes.waiting import patience_seconds, wait_until
from tests.session_folder import end_with_session, once, session_folder

PREFECT = ("prefect", "server", "start", "--host", "127.0.0.1")
_SHARED: "list[Server]" = []
"""Kept for the session: a process object that is forgotten warns."""


class Server:
    """A Prefect server that may be killed and started again: the same port, the same database."""

    def __init__(self, home: Path, *, program: Sequence[str] = PREFECT, **environment: str) -> None:
        self._port, self._program = kept_port(), program
        self._home, self._environment = home, environment
        self.url = f"http://127.0.0.1:{self._port}/api"
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", *self._program, "--port", str(self._port)]
        environment = {**os.environ, "PREFECT_HOME": str(self._home), **self._environment}
        with (self._home / "server.txt").open("ab") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            wait_until_healthy(f"{self.url}/health", self._home / "server.txt")
        except BaseException:  # nobody has this server yet who could end it, also when a signal ends its starter
            self.kill()
            raise

    def signal(self, number: signal.Signals) -> None:
        """Send all of it a signal."""
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End it as a person would, and wait."""
        self.signal(signal.SIGTERM)
        self._process.wait(timeout=patience_seconds())

    def kill(self) -> None:
        """End it at once."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def leave_to_session(self) -> None:
        """Forget it without a warning: the session ends it, after the process that started it."""
        self._process.returncode = 0

    @property
    def process_group(self) -> int:
        """The process group of the server and its children."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not been ended."""
        return self._process.poll() is None


def kept_port() -> int:
    """Return a free port that nobody is given until this process ends; who names it, with SO_REUSEADDR, may listen."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = int(kept.getsockname()[1])
        kept.detach()
    return port


def shared_server() -> str:
    """Return the address of the session's server, started by the first process that asks."""
    return once("prefect-server", _start_shared)


def _start_shared() -> str:
    home = session_folder() / "prefect"
    home.mkdir()
    # The page asks whom it came from; by default it would ask port 4200.
    server = Server(home, PREFECT_SERVER_UI_API_URL="/api")
    _SHARED.append(server)
    atexit.register(server.leave_to_session)
    end_with_session(server.process_group)
    with closing(sqlite3.connect(home / "prefect.db")) as made, closing(sqlite3.connect(_untouched_database())) as copy:
        made.backup(copy)
    return server.url


def own_database(folder: Path) -> Path:
    """Return the database of the temporary server of a command whose work folder is `cache` in this folder."""
    return prefect_home({"CAIRN_CACHE": str(folder / "cache")}) / "prefect.db"


def own_flow_runs(folder: Path) -> list[tuple[str, str]]:
    """Return id and state of the flow runs that such a server has."""
    with closing(sqlite3.connect(own_database(folder))) as database:
        return database.execute("select id, state_name from flow_run").fetchall()


def copy_untouched_database(folder: Path) -> None:
    """Give a command's own server its tables, which take five seconds to make: those of the session's."""
    shared_server()
    own_database(folder).parent.mkdir(parents=True)
    shutil.copyfile(_untouched_database(), own_database(folder))


def _untouched_database() -> Path:
    return session_folder() / "prefect-untouched.db"


def wait_until_healthy(url: str, output: Path) -> None:
    """Wait until a Prefect server answers; show what it said where it never does."""

    def answers() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    wait_until(answers, "an answer of the Prefect server", output.read_text)
