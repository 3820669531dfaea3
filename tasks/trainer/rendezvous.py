"""Where the ranks of several machines meet: signed connections, and a small key-value store in the first's launcher.

The two ends of a connection prove to each other that they know one secret. Nothing is interpreted before the proof:
what is read until then has a fixed length and is compared. Each message is signed with a key of its connection and
direction, and numbered, so none can be forged, repeated, reordered or left out. Nothing is encrypted.
Source: HMAC (RFC 2104), challenge and response as in ISO/IEC 9798-4.
"""

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from cairn.tasks.errors import TaskError

LARGEST_MESSAGE_BYTES = 16 * 1024 * 1024
_GREETING_SECONDS = 10.0
_NONCE_BYTES = _PROOF_BYTES = 32
_LENGTH = struct.Struct(">Q")


class NotAdmitted(TaskError):
    """The other end does not know the secret, or a message is not from it."""


class ConnectionEnded(TaskError):
    """The other end has closed the connection."""


class SignedConnection:
    """A stream of signed messages over a connected socket."""

    def __init__(self, connection: socket.socket, *, sending: bytes, receiving: bytes) -> None:
        self._connection, self._sending, self._receiving = connection, sending, receiving
        self._sent = self._received = 0

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for its next message."""
        return self._connection.fileno()

    def send(self, body: bytes) -> None:
        """Send one message."""
        if len(body) > LARGEST_MESSAGE_BYTES:
            raise TaskError(f"a message of {len(body)} bytes; rule: at most {LARGEST_MESSAGE_BYTES}")
        head = _LENGTH.pack(len(body))
        self._connection.sendall(head + _proof(self._sending, _LENGTH.pack(self._sent), head, body) + body)
        self._sent += 1

    def receive(self) -> bytes:
        """Wait for one message and return it; raises `NotAdmitted` for one that is not signed as it should be."""
        head = _read(self._connection, _LENGTH.size)
        proof = _read(self._connection, _PROOF_BYTES)
        length = _LENGTH.unpack(head)[0]
        if length > LARGEST_MESSAGE_BYTES:
            raise NotAdmitted(f"a message of {length} bytes; rule: at most {LARGEST_MESSAGE_BYTES}")
        body = _read(self._connection, length)
        if not hmac.compare_digest(proof, _proof(self._receiving, _LENGTH.pack(self._received), head, body)):
            raise NotAdmitted("a message is not signed by the other end: another secret, or somebody between the two")
        self._received += 1
        return body

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def admit(connection: socket.socket, secret: bytes) -> SignedConnection:
    """Return the connection as its listening end, once the other end has proved itself; raises `NotAdmitted`."""
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(_GREETING_SECONDS)
    connection.sendall(own)
    other = _read(connection, _NONCE_BYTES)
    if not hmac.compare_digest(_read(connection, _PROOF_BYTES), _proof(secret, b"connects", own, other)):
        raise NotAdmitted("somebody without the secret has connected")
    connection.sendall(_proof(secret, b"listens", own, other))
    connection.settimeout(None)
    down, up = _proof(secret, b"down", own, other), _proof(secret, b"up", own, other)
    return SignedConnection(connection, sending=down, receiving=up)


def greet(connection: socket.socket, secret: bytes) -> SignedConnection:
    """Return the connection as its connecting end, once both ends have proved themselves; raises `NotAdmitted`."""
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(_GREETING_SECONDS)
    other = _read(connection, _NONCE_BYTES)
    connection.sendall(own + _proof(secret, b"connects", other, own))
    if not hmac.compare_digest(_read(connection, _PROOF_BYTES), _proof(secret, b"listens", other, own)):
        raise NotAdmitted("the first machine does not know the secret; give all machines the same one")
    connection.settimeout(None)
    down, up = _proof(secret, b"down", other, own), _proof(secret, b"up", other, own)
    return SignedConnection(connection, sending=up, receiving=down)


def _proof(key: bytes, *parts: bytes) -> bytes:
    """Sign the parts, each with its length, so that no two lists of parts are signed alike."""
    signed = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.new(key, signed, hashlib.sha256).digest()


def _read(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = connection.recv(min(length - len(received), 1 << 20))
        if not part:
            raise ConnectionEnded("the other end has closed the connection")
        received += part
    return bytes(received)


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
            key = request.keys[0] if request.keys else ""
            present = self._values.get(key)
            match request.operation:
                case "join":
                    is_new = request.number not in self._joined
                    self._joined.add(request.number)
                    return Answer(number=int(is_new))
                case "check":
                    return Answer(number=int(all(key in self._values for key in request.keys)))
                case "count":
                    return Answer(number=len(self._values))
                case "add":
                    total = int(present or b"0") + request.number
                    self._values[key] = str(total).encode()
                    return Answer(number=total)
                case "delete":
                    return Answer(number=int(self._values.pop(key, None) is not None))
                case "compare_set" if present != request.expected and (present is not None or request.expected):
                    return Answer(value=request.expected if present is None else present)
                case "set" | "compare_set":
                    self._values[key] = request.value
            return Answer(value=self._values.get(key))


@contextlib.contextmanager
def serving_rendezvous(address: str, secret: bytes) -> Iterator[int]:
    """Serve at HOST:PORT until the block ends, one thread for each connection; yields the port."""
    values = RendezvousValues()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(NotAdmitted, ConnectionEnded, OSError, msgspec.MsgspecError):
            peer = admit(connection, secret)
            while True:
                request = msgspec.msgpack.decode(peer.receive(), type=Request)
                peer.send(msgspec.msgpack.encode(values.answer(request)))

    with listening(address, serve) as port:
        yield port


@contextlib.contextmanager
def listening(address: str, serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Call `serve` with each connection to HOST:PORT, in a thread of its own, until the block ends; yields the port."""

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed: the attempt is over
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with _listener(address) as listener:
        threading.Thread(target=accept, name="rendezvous", daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts


def _listener(address: str) -> socket.socket:
    """Listen at the host's own address; at all addresses where that is not one of this machine's (a service's name)."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        family, _, _, _, found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[:2], family=family)
    try:
        return socket.create_server(("", int(port)))
    except OSError as error:
        raise TaskError(f"{address}: cannot listen there: {error}; CAIRN_RENDEZVOUS names a free port") from error
