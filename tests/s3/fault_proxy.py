"""An HTTP proxy before an S3 server that breaks exactly the request it is aimed at, in the ways networks break.

HTTP-aware, so that it can aim; one request per connection, so that nothing of a fault is left for the next one.
"""

import asyncio
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import pytest

_CONDITION = rb"(?i)\r\n(?:if-none-match|x-goog-if-generation-match): [^\r]*"
_EXPECT = rb"(?i)\r\nexpect: *100-continue"


class NetworkFault(Enum):
    """How a request breaks."""

    SLOW_DOWN = "503 before anything happened"
    INTERNAL_ERROR = "500 before anything happened"
    RESPONSE_LOST = "done, then the connection is reset instead of an answer"
    TORN_UP = "half of the body arrives, then the connection is reset"
    TORN_DOWN = "done, and half of the answer arrives, then the connection is reset"
    HANG = "accepted, never answered"
    REFUSED = "403 before anything happened: the permission is revoked"
    QUOTA = "403 before anything happened: the bucket's quota is used up"
    STORAGE_FULL = "507 before anything happened: the server's disks are full"
    EXPIRED = "400 before anything happened: the token has expired"
    LATE = "accepted, never answered, and done when `deliver` says so"
    FLIPPED = "done, and one bit of what is answered arrives flipped"
    STRIP = "the condition of a create is removed on the way"


OFTEN = frozenset({NetworkFault.SLOW_DOWN, NetworkFault.TORN_UP, NetworkFault.RESPONSE_LOST})
"""A fault before, within and after what is asked: these are tried at every place by default."""


def at_every_place(places: Mapping[str, object], faults: Iterable[NetworkFault], *, whole: str) -> list[Any]:
    """Return every place with every fault, as cases; those that are not `OFTEN` are quick at the `whole` place only."""
    return [
        pytest.param(
            *(place, fault),
            id=f"{name}-{fault.name}",
            marks=() if name == whole or fault in OFTEN else pytest.mark.slow,  # quick witness: the whole place
        )
        for (name, place), fault in itertools.product(places.items(), faults)
    ]


@dataclass
class Aim:
    """Requests whose `METHOD /path?query` matches; from the `nth` on, `times` of them break."""

    fault: NetworkFault
    pattern: str
    nth: int = 1
    times: int = 1
    seen: int = 0

    def hits(self, request: str) -> bool:
        """Count the request if it matches and say whether it breaks."""
        if not re.search(self.pattern, request):
            return False
        self.seen += 1
        return self.nth <= self.seen < self.nth + self.times

    @property
    def fired(self) -> bool:
        """Whether a request was broken."""
        return self.seen >= self.nth


@dataclass
class FaultProxy:
    """A proxy on a free port of loopback while it is entered; `requests` is what came, in order.

    `on_hang` is called when a request came that is never answered.
    """

    upstream: str
    requests: list[str] = field(default_factory=list)
    aims: list[Aim] = field(default_factory=list)
    endpoint: str = ""
    loop: Any = None
    on_hang: Callable[[], None] = lambda: None
    late: list[tuple[bytes, bytes]] = field(default_factory=list)
    tasks: "set[asyncio.Task[None] | None]" = field(default_factory=set)

    def aim(self, fault: NetworkFault, pattern: str, *, nth: int = 1, times: int = 1) -> Aim:
        """Break requests from now on."""
        self.aims.append(Aim(fault=fault, pattern=pattern, nth=nth, times=times))
        return self.aims[-1]

    def deliver(self) -> int:
        """Let every request that was held back arrive at the server now; returns how many there were."""
        held, self.late = self.late, []
        for head, body in held:
            asyncio.run_coroutine_threadsafe(self._forward(head, body), self.loop).result(60)
        return len(held)

    def __enter__(self) -> "FaultProxy":
        started = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self.thread.start()
        assert started.wait(240)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join(10)

    async def _serve(self, started: threading.Event) -> None:
        self.loop, self.ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await self.ended.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self.tasks.add(task)  # asyncio itself keeps only weak references, and a client that leaves takes the others
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if re.search(_EXPECT, head):
                head = re.sub(_EXPECT, b"", head)
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            await self._answer(head, body, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.tasks.discard(task)
            writer.close()

    async def _answer(
        self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        method, target = head.split(b" ", 2)[:2]
        request = f"{method.decode()} {unquote(target.decode())}"
        self.requests.append(request)
        fault = next((aim.fault for aim in self.aims if aim.hits(request)), None)
        match fault:
            case NetworkFault.SLOW_DOWN:
                answer = _error("503 Slow Down", "SlowDown")
            case NetworkFault.INTERNAL_ERROR:
                answer = _error("500 Internal Server Error", "InternalError")
            case NetworkFault.REFUSED:
                answer = _error("403 Forbidden", "AccessDenied")
            case NetworkFault.QUOTA:
                answer = _error("403 Forbidden", "QuotaExceeded")
            case NetworkFault.STORAGE_FULL:
                answer = _error("507 Insufficient Storage", "XMinioStorageFull")
            case NetworkFault.EXPIRED:
                answer = _error("400 Bad Request", "ExpiredToken")
            case NetworkFault.HANG:
                self.on_hang()
                await reader.read()
                return
            case NetworkFault.LATE:
                self.late.append((head, body))
                await reader.read()
                return
            case NetworkFault.TORN_UP:
                await self._forward(head, body[: len(body) // 2])
                return writer.transport.abort()
            case NetworkFault.STRIP:
                answer = await self._forward(re.sub(_CONDITION, b"", head), body)
            case _:
                answer = await self._forward(head, body)
        if fault is NetworkFault.RESPONSE_LOST:
            return writer.transport.abort()
        if fault is NetworkFault.FLIPPED:
            answer = _flipped(answer)
        if fault is NetworkFault.TORN_DOWN:
            start = answer.index(b"\r\n\r\n") + 4
            answer = answer[: start + (len(answer) - start) // 2]
        writer.write(answer)
        await writer.drain()
        return None

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        """Return the server's answer to the request, or nothing where the body is shorter than promised."""
        address = urlsplit(self.upstream)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        whole = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", head)[:-4] + b"\r\nConnection: close\r\n\r\n"
        try:
            writer.write(whole + body)
            await writer.drain()
            promised = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            if promised and int(promised[1]) > len(body):
                return b""
            answer = await reader.read()
        finally:
            writer.close()
        if re.search(rb"(?i)\r\nconnection: *close", answer.partition(b"\r\n\r\n")[0]):
            return answer
        return re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", answer, count=1).replace(
            b"\r\n", b"\r\nConnection: close\r\n", 1
        )


def _flipped(answer: bytes) -> bytes:
    head, separator, body = answer.partition(b"\r\n\r\n")
    return head + separator + bytes([body[0] ^ 1]) + body[1:] if body else answer


def _error(status: str, code: str) -> bytes:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"{head}\r\n\r\n{body}".encode()


class Answering(Protocol):
    """A server that answers somewhere."""

    @property
    def endpoint(self) -> str:
        """Where."""


@pytest.fixture(scope="session")
def shared_proxy(server: Answering) -> Iterator[FaultProxy]:
    """One proxy for all tests of a server, as clients take long to make."""
    with FaultProxy(upstream=server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """The proxy; nothing breaks until it is aimed."""
    shared_proxy.requests.clear()
    yield shared_proxy
    shared_proxy.aims.clear()
