"""A Prefect API that dies young: it answers the first question, for its version, and is gone."""

import http.server
import threading
from typing import Any


class ShortLivedApi:
    """Listens on a free port of the loopback until it has answered once."""

    def __init__(self) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                return

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-length", "7")
                self.end_headers()
                self.wfile.write(b'"3.8.8"')

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/api"
        threading.Thread(target=self._answer_once, daemon=True).start()

    def _answer_once(self) -> None:
        self._server.handle_request()
        self._server.server_close()
