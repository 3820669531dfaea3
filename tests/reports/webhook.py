"""A webhook on the loopback that takes, refuses or hangs."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.loopback import serving

PATIENCE_SECONDS = 120.0


class Hook:
    """What was posted, and how the next posts are answered."""

    def __init__(self) -> None:
        self.url = ""
        self.statuses: list[int] = []
        self.posted: list[dict[str, Any]] = []
        self.arrived, self.let_go, self.taken = threading.Event(), threading.Event(), threading.Event()
        self.hangs = False


@contextmanager
def serving_hook() -> Iterator[Hook]:
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            hook.arrived.set()
            if hook.hangs:
                hook.let_go.wait(PATIENCE_SECONDS)
            status = hook.statuses.pop(0) if hook.statuses else 204
            hook.posted += [content] if status == 204 else []
            self.send_response(status)
            self.end_headers()
            if status == 204:
                hook.taken.set()

    with serving(Handler) as url:
        hook.url = f"{url}/hidden-word"
        try:
            yield hook
        finally:
            hook.let_go.set()
