"""Signed connections: the two ends prove that they know one secret, and a listener takes none that does not.

Nothing is interpreted before the proof: what is read until then has a fixed length and is compared. Each message is
signed with a key of its connection and direction, and numbered, so none can be forged, repeated, reordered or left out.
Nothing is encrypted. A connection that is silent for half a minute is lost.
Source: HMAC (RFC 2104), challenge and response as in ISO/IEC 9798-4.
"""

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from cairn.tasks.errors import TaskError

LARGEST_MESSAGE_BYTES = 16 * 1024 * 1024
MOST_UNPROVEN = 64
"""Connections that have not proved themselves yet; one more closes the oldest, whose end would have done so at once."""
GREETING_SECONDS = 10.0
"""The time of each end for the whole proof."""
_MOST_LINES = 20
_NONCE_BYTES = _PROOF_BYTES = 32
_LENGTH = struct.Struct(">Q")
_POLL_SECONDS, _SHORT_SECONDS = 0.2, 0.01
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


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
    own, deadline = secrets.token_bytes(_NONCE_BYTES), time.monotonic() + GREETING_SECONDS
    connection.settimeout(GREETING_SECONDS)
    connection.sendall(own)
    other = _read(connection, _NONCE_BYTES, deadline)
    if not hmac.compare_digest(_read(connection, _PROOF_BYTES, deadline), _proof(secret, b"connects", own, other)):
        raise NotAdmitted("somebody without the secret has connected")
    connection.sendall(_proof(secret, b"listens", own, other))
    connection.settimeout(None)
    down, up = _proof(secret, b"down", own, other), _proof(secret, b"up", own, other)
    return SignedConnection(connection, sending=down, receiving=up)


def greet(connection: socket.socket, secret: bytes) -> SignedConnection:
    """Return the connection as its connecting end, once both ends have proved themselves; raises `NotAdmitted`."""
    own, deadline = secrets.token_bytes(_NONCE_BYTES), time.monotonic() + GREETING_SECONDS
    other = _read(connection, _NONCE_BYTES, deadline)
    connection.sendall(own + _proof(secret, b"connects", other, own))
    if not hmac.compare_digest(_read(connection, _PROOF_BYTES, deadline), _proof(secret, b"listens", other, own)):
        raise NotAdmitted("the first machine does not know the secret; give all machines the same one")
    connection.settimeout(None)
    down, up = _proof(secret, b"down", other, own), _proof(secret, b"up", other, own)
    return SignedConnection(connection, sending=up, receiving=down)


def connect(address: str, secret: bytes, *, timeout_seconds: float) -> SignedConnection:
    """Connect to HOST:PORT and return the connection as `greet` does; raises OSError and `ConnectionEnded` too."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=timeout_seconds)
    try:
        _keep_alive(connection)
        return greet(connection, secret)
    except BaseException:
        connection.close()
        raise


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice within half a minute that the other end is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(key: bytes, *parts: bytes) -> bytes:
    """Sign the parts, each with its length, so that no two lists of parts are signed alike."""
    signed = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.new(key, signed, hashlib.sha256).digest()


def _read(connection: socket.socket, length: int, deadline: float | None = None) -> bytes:
    received = bytearray()
    while len(received) < length:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(min(length - len(received), 1 << 20))
        if not part:
            raise ConnectionEnded("the other end has closed the connection")
        received += part
    return bytes(received)


class _Door:
    """The connections that have not proved themselves, and what was said of those that did not; for several threads."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said, self._changing = say, set[str](), threading.Lock()
        self._unproven: dict[socket.socket, None] = {}

    @contextlib.contextmanager
    def admitting(self, connection: socket.socket) -> Iterator[None]:
        """Count the connection as unproven while the block runs, and say why it ends badly, if it does."""
        with self._changing:
            self._unproven[connection] = None
            is_full = len(self._unproven) > MOST_UNPROVEN
        if is_full:
            self.close_oldest()
        try:
            yield
        except (NotAdmitted, ConnectionEnded, OSError) as error:
            with contextlib.suppress(OSError):
                self.say(f"{connection.getpeername()[0]} was not admitted: {error}")
            raise
        finally:
            with self._changing:
                self._unproven.pop(connection, None)

    def close_oldest(self) -> bool:
        """Hang up on the connection that has been unproven for the longest time; returns whether there is one."""
        with self._changing:
            if (oldest := next(iter(self._unproven), None)) is not None:
                del self._unproven[oldest]
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end
        return oldest is not None

    def say(self, line: str) -> None:
        """Say a line once, of many lines the first twenty."""
        with self._changing:
            is_new = line not in self._said and len(self._said) < _MOST_LINES
            self._said |= {line} if is_new else set()
        if is_new:
            self._say(line)


@contextlib.contextmanager
def listening(
    address: str, secret: bytes, serve: Callable[[SignedConnection], None], say: Callable[[str], None]
) -> Iterator[int]:
    """Call `serve` with each connection to HOST:PORT that proves itself, until the block ends; yields the port.

    Each has a thread of its own. An error of `accept`, such as too many open files, is said and passes.
    """
    door, over = _Door(say), threading.Event()

    def admit_and_serve(connection: socket.socket) -> None:
        ends = (NotAdmitted, ConnectionEnded, OSError, msgspec.MsgspecError)
        with connection, contextlib.suppress(*ends):
            with door.admitting(connection):
                peer = admit(connection, secret)
            serve(peer)

    def accept() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
                _keep_alive(connection)
                try:
                    threading.Thread(target=admit_and_serve, args=(connection,), daemon=True).start()
                except RuntimeError:
                    connection.close()
                    raise
            except (OSError, RuntimeError) as error:  # no descriptor, memory or thread left; or closed: it is over
                if not over.is_set():
                    door.say(f"{address}: a connection could not be taken: {error}; the next ones are tried")
                    over.wait(_SHORT_SECONDS if door.close_oldest() else _POLL_SECONDS)

    with _listener(address) as listener:
        threading.Thread(target=accept, name="rendezvous", daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            while door.close_oldest():
                pass


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
