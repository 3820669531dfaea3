"""The metadata services of three clouds on the loopback, which answer what a test says."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ACTION = "/latest/meta-data/spot/instance-action"
GOOGLE = "/computeMetadata/v1/instance"
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
TERMINATE = '{"action": "terminate", "time": "2026-01-01T12:02:00Z"}'
QUIET = {f"{GOOGLE}/preempted": "FALSE", f"{GOOGLE}/maintenance-event": "NONE"}


class Cloud:
    """What the metadata service would say, and what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.asked: list[str] = []
        self.status: int | None = None
        self.token = "token-1"
        self.is_google = True
        self.asked_enough = threading.Event()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        self.asked.append(f"{method} {path}")
        if len(self.asked) >= 6:
            self.asked_enough.set()
        if self.status is not None:
            return self.status, "down"
        if path == "/latest/api/token":
            lifetime = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            return (200, self.token) if method == "PUT" and lifetime.isdecimal() else (405, "")
        if path.startswith("/latest/") and headers.get("x-aws-ec2-metadata-token") != self.token:
            return 401, "unauthorized"
        if path.startswith("/computeMetadata/") and headers.get("metadata-flavor") != "Google":
            return 403, "missing Metadata-Flavor"
        if path.startswith("/metadata/") and headers.get("metadata") != "true":
            return 400, "missing Metadata"
        return (200, self.answers[path]) if path in self.answers else (404, "not found")


@contextmanager
def served(cloud: Cloud) -> Iterator[str]:
    """Serve the cloud on the loopback while the block runs; yields host and port."""

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, body = cloud.answer(self.command, self.path, headers)
            self.send_response(status)
            if cloud.is_google:
                self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = reply

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
