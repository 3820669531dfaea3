"""Several machines: who is here, where an attempt's ranks meet, and how the run ended.

The other machines' commands connect to the first's (CAIRN_RENDEZVOUS) and stay connected for as long as they can train;
a connection that is lost, or silent for half a minute, is a machine that is lost.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec

from cairn.tasks.trainer import signed_connection

_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 2.0


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
        self._connected: dict[int, signed_connection.SignedConnection] = {}
        self._hosts: dict[int, str] = {}
        self._training, self._attempt = set[int](), 0
        self._changed = threading.Condition()
        self._on_lost: OnLost = lambda what, host: None

    @contextlib.contextmanager
    def serving(self, address: str, secret: bytes, say: Callable[[str], None]) -> Iterator[None]:
        """Listen at HOST:PORT while the block runs; an exception is sent to the others as exit code 1."""
        with signed_connection.listening(address, secret, self._serve, say):
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

    def _serve(self, peer: signed_connection.SignedConnection) -> None:
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


def connect(address: str, secret: bytes, node_rank: int) -> signed_connection.SignedConnection | None:
    """Connect a machine to the first one; None if that does not answer, or has another secret."""
    try:
        peer = signed_connection.connect(address, secret, timeout_seconds=_CONNECT_SECONDS)
    except (OSError, signed_connection.ConnectionEnded, signed_connection.NotAdmitted):
        return None
    _send(peer, Arrival(node_rank=node_rank, host=socket.gethostname()[:255]))
    return peer


def receive(peer: signed_connection.SignedConnection) -> Message:
    """Wait for one message."""
    message: Message = msgspec.msgpack.decode(peer.receive(), type=Message)
    return message


def _send(peer: signed_connection.SignedConnection, message: Message) -> None:
    with contextlib.suppress(OSError):  # the thread that reads from it notices
        peer.send(msgspec.msgpack.encode(message))
