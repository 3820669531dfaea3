"""Prefect's server as an ASGI application that answers only requests for this machine's own names.

A web page that lets its own name point to 127.0.0.1 (DNS rebinding) is of the server's origin for a browser, but the
requests still carry that name as Host. After SIGUSR1 workers that ask for flow runs get none; these stay scheduled.
"""

import signal

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_HOSTS = ("127.0.0.1", "localhost")
_NEXT_FLOW_RUNS = "/get_scheduled_flow_runs"


def guard(app: ASGIApp) -> ASGIApp:
    """Return `app` behind the check: another Host is answered 400; the port may be any, so that tunnels work."""
    return TrustedHostMiddleware(app, allowed_hosts=_HOSTS, www_redirect=False)


def without_new_work_after_sigusr1(app: ASGIApp) -> ASGIApp:
    """Return `app`, which gives no flow run to a worker once this process has received SIGUSR1."""
    is_leaving = False

    def leave(*_: object) -> None:
        nonlocal is_leaving
        is_leaving = True

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        asks_for_work = scope["type"] == "http" and scope["path"].endswith(_NEXT_FLOW_RUNS)
        await (JSONResponse([]) if is_leaving and asks_for_work else app)(scope, receive, send)

    signal.signal(signal.SIGUSR1, leave)
    return answer


def create_guarded_app() -> ASGIApp:
    """Return Prefect's guarded application; named in deployments/up.sh."""
    from prefect.server.api.server import create_app

    return guard(without_new_work_after_sigusr1(create_app(final=True)))
