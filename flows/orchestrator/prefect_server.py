"""The Prefect server that Cairn starts: its home, the guarded application, and its two ways to serve.

Locks (flock) say who serves the home and who uses it, so that a process that was killed has let go. `make up` and the
temporary servers of commands serve the same home, one at a time; a temporary one ends when no command uses it, or when
`make up` asks for the home. `python -P -m cairn.flows.orchestrator.prefect_server HOME SOCKET LOCK` is a temporary one,
which inherits a listening socket and the home's lock; with `--port N` it is that of `make up`; with `--address-file`
the path of the file with the address is printed. Prefect is imported to serve.
"""

import argparse
import fcntl
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import TYPE_CHECKING

from cairn.flows.orchestrator.prefect_settings import prefect_home
from cairn.storage.stores.child_process import hide_memory
from cairn.tasks.machine import process_scopes

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn import Server

_EPHEMERAL = "CAIRN_EPHEMERAL_SERVER"
"""Holds the address of a temporary server, which has no pages; stands beside it in the file and the environment."""
_SERVING, _USING = "serving.lock", "using.lock"
_FLUSH_SECONDS, _POLL_SECONDS, _HANDOVER_SECONDS = 5.0, 0.2, 15.0
_KEPT = frozenset({"HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV"})
_KEPT_PREFIXES = ("LC_", "DYLD_", "PYTHON", "CAIRN_")
_OPERATORS = (
    "PREFECT_API_DATABASE_",
    "PREFECT_SERVER_DATABASE_",
    "PREFECT_SERVER_API_AUTH_STRING",
    "PREFECT_SERVER_ENCRYPTION_KEY",
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD",
)
"""The settings that `make up` takes from its operator's environment."""


class ServerHome:
    """One folder; a lock is a file descriptor, and let go by closing all its copies.

    `address_file` has a line for a shell that names the server and its password, readable by this user alone, while one
    serves; `handover_file` asks a temporary server, as long as it exists, to end, also one that is used.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder, for this user alone; raises OSError where that is not possible."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder}: belongs to another user")
        folder.chmod(0o700)
        self.folder, self.address_file, self.handover_file = folder, folder / "server", folder / "handover"

    def lock_serving(self) -> int | None:
        """Return the lock of the one server; None while another serves."""
        return _lock(self.folder / _SERVING, fcntl.LOCK_EX)

    def lock_using(self) -> int | None:
        """Return one lock of many, that of a command that uses the server; None while a temporary server ends."""
        return _lock(self.folder / _USING, fcntl.LOCK_SH)

    def lock_unused(self) -> int | None:
        """Return a lock that lets no command use the server any more; None while one does."""
        return _lock(self.folder / _USING, fcntl.LOCK_EX)

    def write_address(self, api_url: str, password: str, *, is_ephemeral: bool) -> None:
        """Replace the address file; a link that lies there is replaced, never followed."""
        variables = {"PREFECT_API_URL": api_url, "PREFECT_API_AUTH_STRING": password}
        variables |= {_EPHEMERAL: api_url} if is_ephemeral else {}
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        beside = self.folder / f".{secrets.token_hex(16)}"
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as written:
            written.write(f"export {' '.join(words)}\n")
        beside.replace(self.address_file)

    def read_address(self) -> dict[str, str]:
        """Return the variables that name the server; none where no server has left them."""
        with suppress(OSError, ValueError):
            return dict(word.split("=", 1) for word in shlex.split(self.address_file.read_text(encoding="utf-8"))[1:])
        return {}


def is_ephemeral_server(environment: Mapping[str, str]) -> bool:
    """Whether the named server is a command's temporary one, where no person can answer or cancel anything."""
    return _EPHEMERAL in environment and environment[_EPHEMERAL] == environment.get("PREFECT_API_URL")


def _lock(path: Path, kind: int) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def new_password() -> str:
    """Return a password for a server: every user of the machine can connect to it."""
    return f"cairn:{secrets.token_urlsafe(24)}"


def _server_environment(
    kind: str, environment: Mapping[str, str], home: ServerHome, password: str, origin: str
) -> dict[str, str]:
    """Return a kind of server's environment, with none of the caller's Prefect settings, proxies or certificates."""
    settings = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    kept = {name: value for name, value in environment.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    return {
        "HOME": str(home.folder),
        **kept,
        **settings["server"],
        "PREFECT_HOME": str(home.folder),
        "PREFECT_PROFILES_PATH": str(home.folder / "profiles.toml"),
        "PREFECT_SERVER_API_AUTH_STRING": password,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origin,
        **settings[kind],
    }


class TemporaryServer:
    """A home that this process has locked, a listening socket, and later the process that is given both."""

    def __init__(self, home: ServerHome, serving: int) -> None:
        """Write the address, which is known before the server answers."""
        self._home, self._serving, self._password = home, serving, new_password()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/api"
        self.child: Popen[bytes] | None = None
        self.log = home.folder / "server.log"
        home.write_address(self._url, self._password, is_ephemeral=True)

    def start(self, environment: Mapping[str, str]) -> Popen[bytes]:
        """Start the process, which alone keeps socket and lock; it ignores what a terminal sends to a whole job."""
        given, folder = (self._listening.fileno(), self._serving), str(self._home.folder)
        # No page may read an answer: an address with a path is nobody's origin.
        settled = _server_environment("temporary", environment, self._home, self._password, origin=self._url)
        command = [sys.executable, "-P", "-m", "cairn.flows.orchestrator.prefect_server", folder, *map(str, given)]
        try:
            with self.log.open("wb") as log:  # the tracebacks of its libraries are hundreds of lines
                self.child = Popen(
                    command, stdin=DEVNULL, stdout=DEVNULL, stderr=log, pass_fds=given, cwd=folder, env=settled
                )
        finally:
            self._let_go()
        return self.child

    def await_end(self, most_seconds: float) -> None:
        """Wait for the process to end, by SIGKILL if it takes too long; a server that was never started is let go."""
        if self.child is None:
            self._home.address_file.unlink(missing_ok=True)
            self._let_go()
        else:
            try:
                self.child.wait(most_seconds)
            except TimeoutExpired:
                self.child.kill()
                self.child.wait()

    def _let_go(self) -> None:
        if self._serving >= 0:
            self._listening.close()
            os.close(self._serving)
            self._serving = -1


def up_environment(environment: Mapping[str, str], home: ServerHome, port: int) -> dict[str, str]:
    """Return the environment of the server of `make up`, with the settings that its operator may make."""
    operators = {name: value for name, value in environment.items() if value and name.startswith(_OPERATORS)}
    return _server_environment("up", environment, home, new_password(), f"http://127.0.0.1:{port}") | operators


def guard(app: "ASGIApp") -> "ASGIApp":
    """Return `app`, which answers another Host than this machine with 400; any port may be named, for tunnels.

    A web page that lets its own name point to 127.0.0.1 (DNS rebinding) is of the server's origin for a browser, but
    the requests still carry that name as Host.
    """
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    return TrustedHostMiddleware(app, allowed_hosts=("127.0.0.1", "localhost"), www_redirect=False)


def drain_on_sigusr1(app: "ASGIApp") -> "ASGIApp":
    """Return `app`, which gives no flow run to a worker once this process has received SIGUSR1; they stay scheduled."""
    from starlette.responses import JSONResponse

    draining = threading.Event()

    async def answer(scope: "Scope", receive: "Receive", send: "Send") -> None:
        asks_for_work = scope["type"] == "http" and scope["path"].endswith("/get_scheduled_flow_runs")
        await (JSONResponse([]) if draining.is_set() and asks_for_work else app)(scope, receive, send)

    signal.signal(signal.SIGUSR1, lambda *_: draining.set())
    return answer


def _guarded_server(log_level: str) -> "Server":
    with process_scopes.collecting_no_garbage():
        import uvicorn
        from prefect.server.api.server import create_app

        _take_write_locks_at_once()
        app = guard(drain_on_sigusr1(create_app(final=True)))
        return uvicorn.Server(uvicorn.Config(app, log_level=log_level, lifespan="on"))


def _take_write_locks_at_once() -> None:
    """Let each transaction of Prefect's wait for SQLite's write lock when it begins, up to a minute.

    Prefect begins deferred ones, which take the lock at their first write: where another was faster, SQLite fails them
    at once ("database is locked") whatever the limit of waiting is, and events and triggers are lost. Prefect has no
    setting for it; PostgreSQL is not concerned.
    """
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction
    AioSqliteConfiguration.begin_transaction = (  # type: ignore[method-assign]
        lambda self, session, with_for_update=False: begin(self, session, with_for_update=True)
    )


def serve_temporarily(home: ServerHome, listening: socket.socket) -> None:
    """Serve until no command uses the home, or `make up` asks for it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    served: list[Server] = []
    threading.Thread(target=_end_when_unused, args=(home, served), name="users", daemon=True).start()
    server = _guarded_server("error")
    served.append(server)
    # Outside the main thread uvicorn leaves the signal handlers alone.
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="server")
    serving.start()
    serving.join()
    sys.exit(0 if server.should_exit else 1)


def _end_when_unused(home: ServerHome, served: "list[Server]") -> None:
    while home.lock_unused() is None and not home.handover_file.exists():
        time.sleep(_POLL_SECONDS)
    home.address_file.unlink(missing_ok=True)
    if not served:
        os._exit(0)  # it has received nothing yet
    logging.disable()  # what it cancels now would print a traceback each
    served[0].should_exit = True  # what it has received is written first
    time.sleep(_FLUSH_SECONDS)
    os._exit(1)


def serve_up(home: ServerHome, port: int) -> None:
    """Serve the home on this port until SIGTERM; a temporary server that serves it is asked to end first."""
    lock = home.lock_serving()
    if lock is None:
        home.handover_file.touch()
        try:
            until = time.monotonic() + _HANDOVER_SECONDS
            while (lock := home.lock_serving()) is None and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        finally:
            home.handover_file.unlink(missing_ok=True)
    if lock is None:
        sys.exit(f"{home.folder} is served by another `make up` or machine; CAIRN_CACHE=FOLDER names another home")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn gives the signal on when it has ended
    listening = socket.create_server(("127.0.0.1", port))
    settled = up_environment(os.environ, home, port)
    os.environ.clear()
    os.environ.update(settled)
    os.chdir(home.folder)
    password = settled["PREFECT_SERVER_API_AUTH_STRING"]
    home.write_address(f"http://127.0.0.1:{port}/api", password, is_ephemeral=False)
    try:
        _guarded_server("warning").run(sockets=[listening])
    finally:
        home.address_file.unlink(missing_ok=True)
        os.close(lock)


def main() -> None:
    """Serve as the command line says."""
    hide_memory()
    parser = argparse.ArgumentParser(prog="python -m cairn.flows.orchestrator.prefect_server", description=__doc__)
    parser.add_argument("--port", type=int, help="serve for `make up`, on this port")
    parser.add_argument("--address-file", action="store_true", help="print where the address of the server is written")
    parser.add_argument("temporary", nargs="*", help="home, socket and lock of a temporary server")
    options = parser.parse_args()
    if options.address_file:
        print(ServerHome(prefect_home(os.environ)).address_file)
    elif options.port:
        serve_up(ServerHome(prefect_home(os.environ)), options.port)
    else:
        folder, number, _ = options.temporary
        serve_temporarily(ServerHome(Path(folder)), socket.socket(fileno=int(number)))


if __name__ == "__main__":
    main()
