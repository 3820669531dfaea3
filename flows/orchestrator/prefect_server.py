"""Which Prefect server is named and whether it answers, a temporary one for one command, and the guarded application.

Run as `python -m cairn.flows.orchestrator.prefect_server`, with a socket's number as its only argument, it is the
temporary server. Only an application that is served imports Prefect.
"""

import atexit
import base64
import logging
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, MutableMapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine import http_request, process_scopes

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn import Server

_MARK = "CAIRN_EPHEMERAL_SERVER"
"""Holds the server's address: the command's flows see that it has no pages and that nobody else knows it."""
_START_SECONDS = 180.0
_STOP_SECONDS, _FLUSH_SECONDS = 8.0, 5.0
_ANSWER_SECONDS, _POLL_SECONDS = 10.0, 0.1
_BACKOFF_SECONDS = (0.0, 1.0, 2.0, 4.0, 8.0)
"""How long each restart waits; after as many in a row the server is given up."""
_LONG_LIFE_SECONDS = 60.0
"""A server that has lived so long begins a new row."""
_SERVER = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    # The catalogue of block types is only for the UI, and takes a second.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    # Only to remember the catalogue it would import every library for Prefect that is installed.
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}
_SERVER_MAY = {
    # Checked twice a minute, automations that wait for something not to happen take little CPU from training.
    "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT30S",
    # After a restart it may drop events of its own log, with a traceback for each.
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
}


def server_address(environment: Mapping[str, str]) -> str:
    """Return PREFECT_API_URL or ""; `InvalidConfiguration` for a wrong one, or a password in it: logs would show it."""
    address = environment.get("PREFECT_API_URL", "")
    if not address:
        return ""
    try:
        parts = urlsplit(address)
        host, secret = parts.hostname, parts.username or parts.password
        _ = parts.port
    except ValueError as error:
        raise InvalidConfiguration("PREFECT_API_URL: is no address; rule: http(s)://host:port/api") from error
    if secret is not None or "@" in parts.netloc:
        raise InvalidConfiguration(
            "PREFECT_API_URL carries a password; put it into PREFECT_API_AUTH_STRING as user:password"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidConfiguration(f"PREFECT_API_URL = {address!r}: rule: http(s)://host:port/api")
    return address


def authorization(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that Prefect's client would send."""
    if key := environment.get("PREFECT_API_KEY"):
        return {"Authorization": f"Bearer {key}"}
    if password := environment.get("PREFECT_API_AUTH_STRING"):
        return {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}
    return {}


def is_server_answering(api_url: str, *, timeout_seconds: float, proxies: bool) -> bool:
    """Whether a server answers at all; an error status and a bad certificate are answers too."""
    request = urllib.request.Request(f"{api_url.rstrip('/')}/health")
    try:
        with http_request.open_directly(request, timeout_seconds=timeout_seconds, proxies=proxies):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False


def is_server_named(environment: Mapping[str, str], folder: Path, *, ask_prefect: Callable[[], str | None]) -> bool:
    """Whether the environment, a profile or a file of `folder` names a server; `ask_prefect` is slow and asked last."""
    if environment.get("PREFECT_API_URL"):
        return True
    home = Path(environment.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    may_be_named = (
        any(environment.get(name) for name in ("PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "PREFECT_API_KEY"))
        or (home / "profiles.toml").exists()
        or (folder / "prefect.toml").exists()
        or "prefect" in _read_text(folder / ".env").lower()
        or _has_prefect_table(folder / "pyproject.toml")
    )
    return may_be_named and bool(ask_prefect())


def _has_prefect_table(path: Path) -> bool:
    try:
        return "prefect" in tomllib.loads(_read_text(path)).get("tool", {})
    except tomllib.TOMLDecodeError:
        return True


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class EphemeralServer:
    """A child process that ends with the command, however that ends, and is started again if it dies.

    The command holds the listening socket, so the address is known before the server answers, requests wait for a
    server that is started again, and no other program can take the port. The server ignores signals, which a terminal
    or scheduler sends to every process of a job; end of file on stdin ends it. Prefect's own temporary server outlives
    a killed command. Every user of the machine can connect, so it asks for a password, which stands in the environment
    of the run alone.
    """

    def __init__(self, environment: Mapping[str, str], *, say: Callable[[str], None]) -> None:
        """Take a port for it; `start` starts it with this environment, and `say` is told when it is given up."""
        self._password = environment.get("PREFECT_SERVER_API_AUTH_STRING") or f"cairn:{secrets.token_urlsafe(24)}"
        self._say, self._stopping, self._lock = say, threading.Event(), threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.api_url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/api"
        # No page may read an answer: an address with a path is nobody's origin.
        own = {"PREFECT_SERVER_API_AUTH_STRING": self._password, "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.api_url}
        self._environment = {**_SERVER_MAY, **environment, **_SERVER, **own}
        self.is_lost = False
        self._child: subprocess.Popen[bytes] | None = None

    def name_in(self, environment: MutableMapping[str, str]) -> None:
        """Set it as the server, with its password, for every later import of Prefect with this environment."""
        environment["PREFECT_API_URL"] = environment[_MARK] = self.api_url
        environment["PREFECT_API_AUTH_STRING"] = self._password

    def forget_in(self, environment: MutableMapping[str, str]) -> None:
        """Undo `name_in`."""
        for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", _MARK):
            environment.pop(name, None)

    def start(self) -> None:
        """Start it, unless it was started; `wait_ready` says when it answers."""
        if self._child is None:
            self._start()
            threading.Thread(target=self._supervise, name="prefect-server", daemon=True).start()
            atexit.register(self.stop)

    def wait_ready(self) -> None:
        """Wait until it answers; raises RuntimeError if it is given up first, or has not answered in three minutes."""
        deadline = time.monotonic() + _START_SECONDS
        # The listening socket keeps the request until the server answers it, or what stands for one that is lost.
        while not is_server_answering(self.api_url, timeout_seconds=_ANSWER_SECONDS, proxies=False) or self.is_lost:
            if self.is_lost or time.monotonic() > deadline:
                self.stop()
                ended = f"it ended with code {self._child.returncode if self._child else None}"
                why = ended if self.is_lost else f"no answer in {_START_SECONDS:.0f} s"
                raise RuntimeError(f"the temporary Prefect server did not start: {why}; set PREFECT_API_URL to another")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Stop it, by SIGKILL if it takes too long; one that has ended is no error."""
        with self._lock:
            self._stopping.set()
        if (child := self._child) is not None and child.stdin is not None:
            child.stdin.close()
            try:
                child.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if not self.is_lost:
            self._listening.close()
        atexit.unregister(self.stop)

    def _start(self) -> None:
        with self._lock:
            if not self._stopping.is_set():
                self._child = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "cairn.flows.orchestrator.prefect_server",
                        str(self._listening.fileno()),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(self._listening.fileno(),),
                    env=self._environment,
                )

    def _supervise(self) -> None:
        restarts = 0
        while self._child is not None:
            began = time.monotonic()
            with self._child as child:  # its stdin stays open for as long as it lives
                child.wait()
            restarts = 0 if time.monotonic() - began >= _LONG_LIFE_SECONDS else restarts
            if restarts == len(_BACKOFF_SECONDS) or self._stopping.wait(_BACKOFF_SECONDS[restarts]):
                break
            restarts += 1
            self._start()
        if not self._stopping.is_set():
            self.is_lost = True
            self._say(f"the temporary Prefect server died {restarts + 1} times: its pages miss the rest of this run")
            # It answers every request in the other's place: Prefect's client then gives up at once, without retries.
            server = ThreadingHTTPServer(("", 0), _Gone, bind_and_activate=False)
            server.socket.close()
            server.socket = self._listening
            server.serve_forever()


class _Gone(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(HTTPStatus.GONE)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        return


def is_ephemeral_server(environment: Mapping[str, str]) -> bool:
    """Whether the named server is a command's temporary one, where no person can answer or cancel anything."""
    return _MARK in environment and environment[_MARK] == environment.get("PREFECT_API_URL")


def guard(app: "ASGIApp") -> "ASGIApp":
    """Return `app`, which answers another Host than this machine with 400; any port may be named, for tunnels.

    A web page that lets its own name point to 127.0.0.1 (DNS rebinding) is of the server's origin for a browser, but
    the requests still carry that name as Host.
    """
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    return TrustedHostMiddleware(app, allowed_hosts=("127.0.0.1", "localhost"), www_redirect=False)


def without_new_work_after_sigusr1(app: "ASGIApp") -> "ASGIApp":
    """Return `app`, which gives no flow run to a worker once this process has received SIGUSR1; they stay scheduled."""
    from starlette.responses import JSONResponse

    is_leaving = False

    def leave(*_: object) -> None:
        nonlocal is_leaving
        is_leaving = True

    async def answer(scope: "Scope", receive: "Receive", send: "Send") -> None:
        asks_for_work = scope["type"] == "http" and scope["path"].endswith("/get_scheduled_flow_runs")
        await (JSONResponse([]) if is_leaving and asks_for_work else app)(scope, receive, send)

    signal.signal(signal.SIGUSR1, leave)
    return answer


def create_guarded_app() -> "ASGIApp":
    """Return Prefect's guarded application; named in deployments/up.sh."""
    from prefect.server.api.server import create_app

    return guard(without_new_work_after_sigusr1(create_app(final=True)))


def main() -> None:
    """Serve until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    served: list[Server] = []
    threading.Thread(target=_end_with_parent, args=(served,), name="parent", daemon=True).start()
    with process_scopes.collecting_no_garbage():
        import uvicorn

        server = uvicorn.Server(uvicorn.Config(create_guarded_app(), log_level="error", lifespan="on"))
    served.append(server)
    listening = socket.socket(fileno=int(sys.argv[1]))
    # Outside the main thread uvicorn leaves the signal handlers alone.
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="server")
    serving.start()
    serving.join()
    sys.exit(0 if server.should_exit else 1)


def _end_with_parent(served: "list[Server]") -> None:
    sys.stdin.buffer.read()
    if not served:
        os._exit(0)  # it has received nothing yet
    logging.disable()  # what it cancels now would print a traceback each
    served[0].should_exit = True  # what it has received is written first
    time.sleep(_FLUSH_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
