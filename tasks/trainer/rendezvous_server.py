"""Where the ranks of several machines meet: a small key-value store in the first machine's launcher.

Whoever connects, once, proves first that it knows the run's secret; only standard types travel (`rank_store`).
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from tasks.errors import TaskError
from tasks.trainer.signed_connection import ConnectionEnded, NotAdmitted, admit


class Request(msgspec.Struct, kw_only=True, frozen=True):
    """What one rank asks: `operation` says what to do with `keys`; `number` is what to add, or the rank that joins."""

    operation: Literal["join", "set", "get", "add", "compare_set", "check", "delete", "count"]
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""
    number: int = 0


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    """The value of a key, or none, and a number: what `add` and `count` return, and 1 for yes elsewhere."""

    value: bytes | None = None
    number: int = 0


class RendezvousValues:
    """The values under their keys, and who has joined; safe to use from several threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._joined: set[int] = set()
        self._lock = threading.Lock()

    def answer(self, request: Request) -> Answer:
        """Do what is asked, at once."""
        with self._lock:
            if request.operation == "join":
                is_new = request.number not in self._joined
                self._joined.add(request.number)
                return Answer(number=int(is_new))
            if request.operation == "check":
                return Answer(number=int(all(key in self._values for key in request.keys)))
            if request.operation == "count":
                return Answer(number=len(self._values))
            return self._of_key(request, request.keys[0])

    def _of_key(self, request: Request, key: str) -> Answer:
        present = self._values.get(key)
        match request.operation:
            case "set":
                self._values[key] = request.value
            case "add":
                total = int(present or b"0") + request.number
                self._values[key] = str(total).encode()
                return Answer(number=total)
            case "compare_set" if (present is None and not request.expected) or present == request.expected:
                self._values[key] = request.value
            case "delete":
                return Answer(number=int(self._values.pop(key, None) is not None))
        return Answer(value=self._values.get(key, request.expected if request.operation == "compare_set" else None))


@contextlib.contextmanager
def serving_rendezvous(address: str, secret: bytes) -> Iterator[int]:
    """Serve at HOST:PORT until the block ends, one thread for each connection; yields the port."""
    host, _, port = address.rpartition(":")
    values = RendezvousValues()
    with listening(host, int(port), lambda connection: _serve(connection, secret, values)) as number:
        yield number


@contextlib.contextmanager
def listening(host: str, port: int, serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Call `serve` with each connection, in a thread of its own, until the block ends; yields the port."""
    with _listener(host, port) as listener:
        threading.Thread(target=_accept, args=(listener, serve), name="rendezvous", daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts


def _listener(host: str, port: int) -> socket.socket:
    """Listen at the host's own address; at all addresses where that is not one of this machine's (a service's name)."""
    with contextlib.suppress(OSError):
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[:2], family=family)
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise TaskError(f"{host}:{port}: cannot listen there: {error}; CAIRN_RENDEZVOUS names a free port") from error


def _accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    with contextlib.suppress(OSError):  # closed: the attempt is over
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket, secret: bytes, values: RendezvousValues) -> None:
    with connection, contextlib.suppress(NotAdmitted, ConnectionEnded, OSError, msgspec.MsgspecError):
        peer = admit(connection, secret)
        while True:
            request = msgspec.msgpack.decode(peer.receive(), type=Request)
            peer.send(msgspec.msgpack.encode(values.answer(request)))
