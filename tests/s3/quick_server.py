"""An S3 emulator in a process of its own; run as a script.

Prints one JSON line `{"endpoint": …, "access_key": …, "secret_key": …}` when it serves on a free port of loopback,
and ends when its standard input does, so it never outlives the process that started it.
"""

import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import ThreadedMotoServer


class OneAtATime:
    """The emulator checks a condition and then writes: only one request at a time makes the two one step."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application, self._lock = application, threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            return self._application({**environ, "wsgi.input": io.BytesIO(body)}, start_response)


def main() -> None:
    """Serve until standard input ends."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    assert server._server is not None
    server._server.app = OneAtATime(server._server.app)
    host, port = server.get_host_and_port()
    print(
        json.dumps({"endpoint": f"http://{host}:{port}", "access_key": "test", "secret_key": "testsecret"}), flush=True
    )
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
