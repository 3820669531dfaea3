"""Prefect's server as an ASGI application that answers only requests for this machine's own names.

A web page that lets its own name point to 127.0.0.1 (DNS rebinding) is of the server's origin for a browser, but the
requests still carry that name as Host.
"""

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

_HOSTS = ("127.0.0.1", "localhost")


def guard(app: ASGIApp) -> ASGIApp:
    """Return `app` behind the check: another Host is answered 400; the port may be any, so that tunnels work."""
    return TrustedHostMiddleware(app, allowed_hosts=_HOSTS, www_redirect=False)


def create_guarded_app() -> ASGIApp:
    """Return Prefect's guarded application; named in deployments/up.sh."""
    from prefect.server.api.server import create_app

    return guard(create_app(final=True))
