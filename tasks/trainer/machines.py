"""Several machines: signed connections, who is here, where an attempt's ranks meet, and how the run ended.

The two ends of a connection prove to each other that they know one secret. Nothing is interpreted before the proof:
what is read until then has a fixed length and is compared. Each message is signed with a key of its connection and
direction, and numbered, so none can be forged, repeated, reordered or left out. Nothing is encrypted.
The other machines' commands connect to the first's (CAIRN_RENDEZVOUS) and stay connected for as long as they can train;
a connection that is lost, or silent for half a minute, is a machine that is lost.
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
from typing import Annotated

import msgspec

from cairn.tasks.errors import TaskError

LARGEST_MESSAGE_BYTES = 16 * 1024 * 1024
_GREETING_SECONDS = 10.0
_NONCE_BYTES = _PROOF_BYTES = 32
_LENGTH = struct.Struct(">Q")
_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 2.0
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


class Arrival(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """A machine's number and its name."""

    node_rank: int
    host: Annotated[str, msgspec.Meta(max_length=255)]


class RanksEnded(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """The ranks of a machine in this attempt have ended."""

    attempt: int
    exit_code: int


class StartRanks(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """An attempt starts: the machine is number `node_rank` of `nodes`, and the ranks meet at `rendezvous`."""

    attempt: int
    nodes: int
    node_rank: int
    rendezvous: str


class RunEnded(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """The first machine's command leaves with this code, and so does the machine's own."""

    exit_code: int


Message = Arrival | RanksEnded | StartRanks | RunEnded
OnLost = Callable[[str, str], None]
"""Called with how a machine was lost, and its name, "" if it is unknown."""


class Machines:
    """The other machines that are connected to the first one; safe to use from several threads."""

    def __init__(self, nodes: int) -> None:
        """Expect machines 1 to `nodes` - 1."""
        self.nodes = nodes
        self._connected: dict[int, SignedConnection] = {}
        self._hosts: dict[int, str] = {}
        self._training, self._attempt = set[int](), 0
        self._changed = threading.Condition()
        self._on_lost: OnLost = lambda what, host: None

    @contextlib.contextmanager
    def serving(self, address: str, secret: bytes) -> Iterator[None]:
        """Listen at HOST:PORT while the block runs; an exception is sent to the others as exit code 1."""
        with listening(address, lambda connection: self._serve(connection, secret)):
            try:
                yield
            except BaseException:
                self.end(1)
                raise

    def gather(self, wait_seconds: float, *, is_stopping: Callable[[], bool]) -> int:
        """Wait until all machines are connected, at most so long; return how many are here, with the first."""
        deadline = time.monotonic() + wait_seconds
        with self._changed:
            while len(self._connected) < self.nodes - 1 and time.monotonic() < deadline and not is_stopping():
                self._changed.wait(_POLL_SECONDS)
            return 1 + len(self._connected)

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """Return the names of the other machines that an attempt of `nodes` machines gets."""
        with self._changed:
            return tuple(self._hosts[number] for number in sorted(self._connected)[: nodes - 1])

    def start_ranks(self, attempt: int, nodes: int, rendezvous: str, on_lost: OnLost) -> None:
        """Start the ranks of `nodes` machines; `on_lost` is called for each that fails before its ranks end well."""
        with self._changed:
            self._on_lost, self._attempt = on_lost, attempt
            chosen = sorted(self._connected.items())[: nodes - 1]
            self._training = {rank for rank, _ in chosen}
            missing = nodes - 1 - len(chosen)
        for number, (_, connection) in enumerate(chosen, 1):
            _send(connection, StartRanks(attempt=attempt, nodes=nodes, node_rank=number, rendezvous=rendezvous))
        if missing:
            on_lost(f"{missing} of {nodes} machines left before the attempt started", "")

    def end(self, exit_code: int) -> None:
        """Tell every machine that the run ends here."""
        with self._changed:
            connected = list(self._connected.values())
        for connection in connected:
            _send(connection, RunEnded(exit_code=exit_code))

    def _serve(self, connection: socket.socket, secret: bytes) -> None:
        with connection, contextlib.suppress(NotAdmitted, ConnectionEnded, OSError, msgspec.MsgspecError):
            peer = _keep_alive(admit(connection, secret), connection)
            arrival = receive(peer)
            if not isinstance(arrival, Arrival) or not 0 < (number := arrival.node_rank) < self.nodes:
                return
            with self._changed:  # a machine that comes back replaces a connection that only seems open
                self._connected[number], self._hosts[number] = peer, arrival.host
                self._changed.notify_all()
            try:
                while isinstance(ended := receive(peer), RanksEnded):
                    if ended.attempt == self._attempt and ended.exit_code:
                        self._lose(number, f"the ranks of {{}} ended with exit code {ended.exit_code}")
                    elif ended.attempt == self._attempt:
                        self._training.discard(number)
            finally:
                with self._changed:
                    if is_gone := self._connected.get(number) is peer:
                        del self._connected[number]
                if is_gone:
                    self._lose(number, "{} is gone")

    def _lose(self, number: int, what: str) -> None:
        if number in self._training:
            self._training.discard(number)
            host = self._hosts[number]
            self._on_lost(what.format(f"machine {number}, {host},"), host)


def connect(address: str, secret: bytes, node_rank: int) -> SignedConnection | None:
    """Connect a machine to the first one; None if that does not answer, or has another secret."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
    except OSError:
        return None
    try:
        peer = _keep_alive(greet(connection, secret), connection)
        peer.send(msgspec.msgpack.encode(Arrival(node_rank=node_rank, host=socket.gethostname()[:255])))
        return peer
    except (OSError, ConnectionEnded, NotAdmitted):
        connection.close()
        return None


def receive(peer: SignedConnection) -> Message:
    """Wait for one message."""
    message: Message = msgspec.msgpack.decode(peer.receive(), type=Message)
    return message


def _send(peer: SignedConnection, message: Message) -> None:
    with contextlib.suppress(OSError):  # the thread that reads from it notices
        peer.send(msgspec.msgpack.encode(message))


def _keep_alive(peer: SignedConnection, connection: socket.socket) -> SignedConnection:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer
