"""The live page of a store, served by a thread of this process on a free port, with a clock that a test moves."""

import http.client
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cairn.storage.stores.object_store import ObjectStore
from cairn.ui.live_page import LivePages
from cairn.ui.local_server import Access, guarded_server
from tests.processes.waiting import patience_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Status, headers with small names, and body."""

    status: int
    headers: Mapping[str, str]
    text: str


@dataclass(kw_only=True, slots=True)
class LiveServer:
    """A server that answers those with its token; `now` are the seconds of its clock."""

    port: int = 0
    access: Access = field(default_factory=Access)
    now: float = 0.0
    patience_seconds: float = field(default_factory=patience_seconds)

    def at(self, path: str) -> str:
        """Return an address for a browser."""
        return f"http://127.0.0.1:{self.port}{path}{'&' if '?' in path else '?'}token={self.access.token}"

    @property
    def credentials(self) -> Mapping[str, str]:
        """The header with which it answers."""
        return {"Authorization": f"Bearer {self.access.token}"}

    def ask(
        self, path: str, *, method: str = "GET", wait: float = 1e6, body: bytes | None = None, **headers: str
    ) -> Answer:
        """Ask for a path after so many seconds of the server's clock; headers may be other ones."""
        self.now += wait
        with self.asking(path, method=method, body=body, **headers) as answer:
            text = answer.read().decode()
            return Answer(
                status=answer.status, headers={name.lower(): value for name, value in answer.getheaders()}, text=text
            )

    @contextmanager
    def asking(
        self, path: str, *, method: str = "POST", body: bytes | None = None, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """Ask for a path from a page of the server itself; the block reads the answer and leaves."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience_seconds)
        own = {"Host": f"127.0.0.1:{self.port}", "Origin": f"http://127.0.0.1:{self.port}", **self.credentials}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body=body, headers=own | named)
            with connection.getresponse() as answer:
                yield answer
        finally:
            connection.close()


@contextmanager
def served(
    store: ObjectStore,
    work: Path,
    environment: Mapping[str, str] | None = None,
    *,
    metrics_token: str = "",
    prompts: bool = False,
) -> Iterator[LiveServer]:
    """Serve a store."""
    live = LiveServer(access=Access(metrics_token=metrics_token))
    chosen = {"CAIRN_CACHE": str(work), **(environment or {})}
    app = LivePages(store, chosen, prompts=prompts, clock=lambda: live.now).make_app()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        live.port = listening.getsockname()[1]
        server = guarded_server(app, live.access)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()  # the socket takes connections already
        try:
            yield live
        finally:
            server.should_exit = True
            thread.join()
