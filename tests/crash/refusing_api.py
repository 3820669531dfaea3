"""A Prefect API with a fault: a proxy before the real one that answers 500 to whatever it was told to refuse."""

import http.server
import re
import threading
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

_DROPPED = frozenset({"host", "connection", "content-length", "accept-encoding", "transfer-encoding"})


class RefusingApi:
    """Passes requests on to `api_url`; paths that match `refused` are answered with 500 and counted."""

    def __init__(self, api_url: str, refused: str) -> None:
        """Listen on a free port of the loopback until `close`."""
        upstream, pattern, counts = api_url.removesuffix("/api"), re.compile(refused), Counter[str]()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                return

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                found = pattern.search(self.path)
                if found:
                    counts[found.group()] += 1
                    self._answer(500, b'{"detail": "refused by the test"}')
                    return
                headers = {key: value for key, value in self.headers.items() if key.lower() not in _DROPPED}
                request = urllib.request.Request(upstream + self.path, body or None, headers, method=self.command)
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        self._answer(answer.status, answer.read())
                except urllib.error.HTTPError as error:
                    self._answer(error.code, error.read())

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _pass_on

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.counts = counts
        self.url = f"http://127.0.0.1:{self._server.server_port}/api"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
