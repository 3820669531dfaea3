"""The HTTP server on the loopback of `cairn ui` and of `cairn watch --metrics-port`, and the requests that it answers.

A connection ends that sends no request, only half of one, or does not read its answer; the oldest idle one makes room.
"""

import asyncio
import os
import secrets
import socket
from dataclasses import dataclass, field
from functools import partial
from hmac import compare_digest
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from starlette import applications, requests, responses, routing
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from uvicorn.protocols.http.h11_impl import H11Protocol

from cairn.reports.queries.run_metrics import CONTENT_TYPE, RunMetrics
from cairn.storage.stores import object_store, regular_file
from cairn.tasks.errors import InvalidConfiguration

METRICS = "/metrics"
_EMPTY = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="  # a style element that Plotly fills through the CSSOM
_MAPS = "sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o="  # that of its maps, which it fills as text
_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' '{_EMPTY}' '{_MAPS}'; "
    "connect-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
REQUEST_SECONDS, MOST_SECONDS, MOST_CONNECTIONS = 10.0, 120.0, 256
"""Until a connection's first request; of a connection, and as long again for its last answer; connections at once."""
_CONNECTIONS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # the latter has ::ffff:127.0.0.1
_OWNED = ("01", "04", "05", "08")  # established, or closed at one end
_FEWEST_CHARACTERS, _MOST_TOKEN_BYTES = 16, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """The token of this server's user, and one with which any user of the machine reads /metrics, if there is one."""

    token: str = field(default_factory=partial(secrets.token_urlsafe, 32))
    metrics_token: str = ""

    def admits(self, request: requests.Request) -> bool:
        """Whether a request has a token for its path: as Bearer, in its address or in the cookie of an answer."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.metrics_token and request.url.path == METRICS and _is_equal(bearer, self.metrics_token):
            return True
        given = (bearer, request.query_params.get("token", ""), request.cookies.get(_cookie_name(request), ""))
        return any(_is_equal(one, self.token) for one in given) and is_own_user(request)


def read_access(metrics_token_file: str) -> Access:
    """Return a new token, and that of the file, if one is named; raises `InvalidConfiguration`."""
    if not metrics_token_file:
        return Access()
    try:
        token = regular_file.read_file(metrics_token_file, _MOST_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f"--metrics-token-file {metrics_token_file}: cannot be read: {error}") from error
    if len(token) < _FEWEST_CHARACTERS or not token.isprintable() or " " in token:
        rule = f"one word of at least {_FEWEST_CHARACTERS} characters, such as `openssl rand -hex 32` prints"
        raise InvalidConfiguration(f"--metrics-token-file {metrics_token_file}: it holds no token; rule: {rule}")
    return Access(metrics_token=token)


def guarded_server(app: applications.Starlette, access: Access) -> uvicorn.Server:
    """Return the server that answers guarded requests over bounded connections."""
    app.add_middleware(BaseHTTPMiddleware, dispatch=partial(_guard, access))
    bounds: dict[str, Any] = {"timeout_graceful_shutdown": 1, "http": partial(BoundedConnection, {})}
    quiet: dict[str, Any] = {"log_level": "error", "access_log": False}
    config = uvicorn.Config(app, lifespan="off", ws="none", proxy_headers=False, **quiet, **bounds)
    server = app.state.server = uvicorn.Server(config)
    return server


def address_of(listening: socket.socket, access: Access, path: str = "/") -> str:
    """Return an address of the server with its token."""
    return "http://{}:{}{}?token={}".format(*listening.getsockname(), path, access.token)


class BoundedConnection:
    """A connection of uvicorn's that is closed when it takes too long or when too many are open."""

    def __init__(self, others: "dict[BoundedConnection, None]", **given: Any) -> None:
        """`others` are the server's open connections, the oldest first."""
        self._others, self._inner = others, H11Protocol(**given)
        self._timers: list[asyncio.TimerHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # data is received, and writing paused, as by uvicorn's own

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Set the limits, and close the oldest idle connection if there are too many."""
        if len(self._others) >= MOST_CONNECTIONS:
            idle = (one for one in self._others if one._inner.cycle is None or one._inner.cycle.response_complete)
            next(idle, next(iter(self._others))).end()
        self._others[self] = None
        self._inner.connection_made(transport)
        later = asyncio.get_running_loop().call_later
        self._timers = [later(REQUEST_SECONDS, self._end_without_request), later(2 * MOST_SECONDS, self.end)]
        self._timers.append(later(MOST_SECONDS, self._inner.shutdown))  # after the answer under way

    def end(self) -> None:
        """Close the connection now."""
        self._others.pop(self, None)
        self._inner.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._others.pop(self, None)
        for timer in self._timers:
            timer.cancel()
        self._inner.connection_lost(exc)

    def _end_without_request(self) -> None:
        first: object = self._inner.cycle
        if first is None:
            self.end()


def serve_metrics(store: object_store.ObjectStore, port: int, token_file: str = "") -> str:
    """Answer scrapes on this port of 127.0.0.1 from a thread of this process; returns the address, with its token."""
    metrics, access = RunMetrics(store), read_access(token_file)

    def answer(request: requests.Request) -> responses.Response:
        return responses.Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    server = guarded_server(applications.Starlette(routes=[routing.Route(METRICS, answer)]), access)
    listening = listen(port, "--metrics-port")
    Thread(target=server.run, args=([listening],), name="metrics", daemon=True).start()
    return address_of(listening, access, METRICS)


def listen(port: int, option: str) -> socket.socket:
    """Return a socket on 127.0.0.1, any free port for 0; raises `InvalidConfiguration` where the port is taken."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "must be 0 to 65535"
        raise InvalidConfiguration(f"{option} {port}: {why}; choose another one, or 0 for any that is free") from error


async def _guard(access: Access, request: requests.Request, answer: RequestResponseEndpoint) -> responses.Response:
    """Answer a request or refuse it, with the headers that restrict a browser.

    Only this machine's own names are served (against DNS rebinding), and only with a token. More than reading needs the
    Origin of this server too: browsers send its cookie also for pages of other ports.
    """
    own, hosts = request.scope["server"][1], request.headers.getlist("host")
    if hosts not in ([f"127.0.0.1:{own}"], [f"localhost:{own}"]):
        why = f"ask for http://127.0.0.1:{own}/: no other name of this machine is answered\n"
        response: responses.Response = responses.PlainTextResponse(why, status_code=400)
    elif request.method not in ("GET", "HEAD") and request.headers.getlist("origin") != [f"http://{hosts[0]}"]:
        why = "only a page of this server asks for more than reading: others are refused by their Origin\n"
        response = responses.PlainTextResponse(why, status_code=403)
    elif not access.admits(request):
        why = "this page is for the user who started it: open the address that was printed, which has a token\n"
        response = responses.PlainTextResponse(why, status_code=401, headers={"www-authenticate": "Bearer"})
    else:
        response = await answer(request)
        if "token" in request.query_params:
            response.set_cookie(_cookie_name(request), access.token, httponly=True, samesite="lax")
    response.headers.update(HEADERS)
    return response


def _cookie_name(request: requests.Request) -> str:
    return f"cairn-{request.scope['server'][1]}"  # browsers give a cookie to every port


def _is_equal(given: str, token: str) -> bool:
    return compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())


def is_own_user(request: requests.Request) -> bool:
    """Whether a connection is this user's or root's; one that a system does not list is nobody's.

    A second lock: a browser gives its cookie to every server of 127.0.0.1. A system without lists has the first alone.
    """
    own, asking = request.scope["server"][1], request.scope["client"][1]
    tables = [table for table in _CONNECTIONS if table.exists()]
    users = (find_user(table, client_port=asking, server_port=own) for table in 2 * tables)  # rows may move
    return not tables or next((user for user in users if user is not None), None) in (0, os.getuid())


def find_user(connections: Path, *, client_port: int, server_port: int) -> int | None:
    """Return the user of the client's end of a connection on 127.0.0.1; None if this table does not say.

    A connection that waits for its last packets belongs to nobody any more, and its row says root.
    """
    try:
        rows = connections.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    for row in rows:
        _, local, remote, state, _, _, _, user, *_ = row.split()
        ends = local.endswith(f"0100007F:{client_port:04X}") and remote.endswith(f"0100007F:{server_port:04X}")
        if ends and state in _OWNED:
            return int(user)
    return None
