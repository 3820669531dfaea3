"""Who may ask the live page, and what a browser may do with its answers.

Only this machine's own names are served (against DNS rebinding), only reading, and, where the system says whose a
connection is, only this user and root. The one hash is that of an empty style element, which the plotting library
fills through the CSSOM.
"""

import os
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_EMPTY = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' '{_EMPTY}'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = (
    ("content-security-policy", _POLICY),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
)
METRICS = "/metrics"
"""What any user may read, because a monitoring system is often one of its own; the numbers of runs by their names."""


class Guard:
    """ASGI middleware before everything else."""

    def __init__(self, app: ASGIApp, *, connections: Path = Path("/proc/net/tcp")) -> None:
        self._app, self._connections = app, connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        headers = [(name.encode(), value.encode()) for name, value in HEADERS]

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_guarded)
            return
        status, why = refusal
        plain = [(b"content-type", b"text/plain; charset=utf-8")]
        await send_guarded({"type": "http.response.start", "status": status, "headers": plain})
        await send_guarded({"type": "http.response.body", "body": why.encode()})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason if the request is not answered."""
        own, asking = scope["server"], scope["client"]
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0].decode("latin-1") not in (f"127.0.0.1:{own[1]}", f"localhost:{own[1]}"):
            return 400, f"ask for http://127.0.0.1:{own[1]}/: no other name of this machine is answered\n"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this page only reads\n"
        user = find_user(self._connections, client_port=asking[1], server_port=own[1])
        if scope["path"] != METRICS and user is not None and user not in (0, os.getuid()):
            return 403, "this page is for the user who started it\n"
        return None


def find_user(connections: Path, *, client_port: int, server_port: int) -> int | None:
    """Return the user of the client's end of a connection on the loopback; None if the system does not say."""
    try:
        rows = connections.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    for row in rows:
        _, local, remote, _, _, _, _, user, *_ = row.split()
        if local.endswith(f":{client_port:04X}") and remote.endswith(f":{server_port:04X}"):
            return int(user)
    return None
