"""An HTTP server on the loopback that remembers every request and answers with nothing, a redirect or a flood."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHUNK = b" " * 65536


@dataclass(kw_only=True, slots=True)
class RecordingServer:
    """What was asked, with its headers, and what was sent; `redirect_to` is where every request is sent on."""

    url: str = ""
    redirect_to: str = ""
    flood_bytes: int = 0
    sent_bytes: int = 0
    requests: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def recording_server(**answer: str | int) -> Iterator[RecordingServer]:
    """Serve on a free port while the block runs."""
    recorded = RecordingServer(**answer)  # type: ignore[arg-type]

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            recorded.requests.append(f"{self.command} {self.path}")
            recorded.headers.append({name.lower(): value for name, value in self.headers.items()})
            is_sent_on = recorded.redirect_to and self.command != "PUT"  # nobody follows those
            self.send_response(302 if is_sent_on else 200)
            if is_sent_on:
                self.send_header("Location", f"{recorded.redirect_to}{self.path}")
            self.end_headers()
            with suppress(OSError):  # the client has read enough
                for _ in range(recorded.flood_bytes // len(CHUNK)):
                    recorded.sent_bytes += self.wfile.write(CHUNK)

        do_GET = do_POST = do_PUT = reply

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        recorded.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield recorded
        finally:
            server.shutdown()
            thread.join()
