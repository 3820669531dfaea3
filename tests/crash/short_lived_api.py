"""A Prefect API that dies young: it answers a given number of questions for its health, and is gone."""

import http.server
import threading
from typing import Any


class ShortLivedApi:
    """Listens on a free port of the loopback until it has answered `answers` times."""

    def __init__(self, *, answers: int) -> None:
        self._left = answers
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                return

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-length", "4")
                self.end_headers()
                self.wfile.write(b"true")
                outer._left -= 1

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/api"
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        while self._left > 0:
            self._server.handle_request()
        self._server.server_close()
