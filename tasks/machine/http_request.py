"""HTTP requests that may carry credentials: they go to the server that is named, and no redirect is followed."""

from typing import Any
from urllib import request as http

_HANDLERS = (http.HTTPHandler, http.HTTPSHandler, http.HTTPDefaultErrorHandler, http.HTTPErrorProcessor)


def open_directly(request: http.Request, *, timeout_seconds: float, proxies: bool = True) -> Any:
    """Send the request and return the open answer; raises `HTTPError` for every other status, redirects included."""
    opener = http.OpenerDirector()
    for handler in (*(kind() for kind in _HANDLERS), http.ProxyHandler(None if proxies else {})):
        opener.add_handler(handler)
    return opener.open(request, timeout=timeout_seconds)
