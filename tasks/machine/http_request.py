"""HTTP requests that may carry credentials: they go to the server that is named, and no redirect is followed."""

from typing import Any
from urllib import request as http
from urllib.parse import urlsplit

_HANDLERS = (http.HTTPHandler, http.HTTPSHandler, http.HTTPDefaultErrorHandler, http.HTTPErrorProcessor)


def open_directly(request: http.Request, *, timeout_seconds: float, proxies: bool = True) -> Any:
    """Send the request and return the open answer; raises `HTTPError` for every other status, redirects included.

    A proxy of the environment is used if `proxies`, but never to this machine's own loopback.
    """
    opener = http.OpenerDirector()
    chosen = http.ProxyHandler(None if proxies and not is_loopback(request.full_url) else {})
    for handler in (*(kind() for kind in _HANDLERS), chosen):
        opener.add_handler(handler)
    return opener.open(request, timeout=timeout_seconds)


def is_loopback(url: str) -> bool:
    """Whether the address is this machine itself."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
