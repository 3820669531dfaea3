"""HTTP requests that may carry credentials: they go to the server that is named, and no redirect is followed."""

from typing import Any
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)


def open_directly(request: Request, *, timeout_seconds: float, proxies: bool = True) -> Any:
    """Send the request and return the open answer; raises `HTTPError` for every other status, redirects included."""
    opener = OpenerDirector()
    for handler in (HTTPHandler, HTTPSHandler, HTTPDefaultErrorHandler, HTTPErrorProcessor, UnknownHandler):
        opener.add_handler(handler())
    opener.add_handler(ProxyHandler() if proxies else ProxyHandler({}))
    return opener.open(request, timeout=timeout_seconds)
