"""Several machines: who is here, where an attempt's ranks meet, and how the run ended.

The other machines' commands connect to the first's (CAIRN_RENDEZVOUS) and stay connected for as long as they can train;
a connection that is lost, or silent for half a minute, is a machine that is lost.
"""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Protocol

import msgspec

from cairn.tasks.policy.failures import OUTLIVED_EXIT_CODE
from cairn.tasks.trainer import signed_connection
from cairn.tasks.trainer.trainer_protocol import RanksOutlived

_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 2.0
_MOST_ORDERS = 8
"""In one attempt, to a machine that stays connected: if its ranks end each time, something is wrong there."""


class Arrival(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """A machine's number and its name."""

    node_rank: int
    host: Annotated[str, msgspec.Meta(max_length=255)]


class RanksEnded(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """The ranks that a machine started in this attempt, by the number it was given, have ended."""

    attempt: int
    node_rank: int
    exit_code: int


class StartRanks(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """An attempt starts: the machine is number `node_rank` of `nodes`, and the ranks meet at `rendezvous`.

    Or it `joins` one that is under way, in the place of a machine that was lost; its number is a new one.
    """

    attempt: int
    nodes: int
    node_rank: int
    rendezvous: str
    joins: bool = False


class RunEnded(msgspec.Struct, kw_only=True, frozen=True, tag=True):
    """The first machine's command leaves with this code, and so does the machine's own."""

    exit_code: int


Message = Arrival | RanksEnded | StartRanks | RunEnded


class LostMachine(msgspec.Struct, kw_only=True, frozen=True):
    """How a machine was lost, its name, and the number by which its ranks were started; of one that never came, 0."""

    what: str
    host: str = ""
    node_rank: int = 0


class OnLost(Protocol):
    """Called when a machine was lost; whether as many are left as an attempt needs."""

    def __call__(self, *, is_enough: bool) -> None:
        """Hear of it."""


class Machines:
    """The other machines that are connected to the first one; safe to use from several threads."""

    def __init__(self, nodes: int, *, spares: int = 0, at_least: int = 0) -> None:
        """Expect machines 1 to `nodes` - 1, and as many more as there are spares; each can stand for any other.

        An attempt that loses some goes on with `at_least` so many, with the first.
        """
        self.nodes, self._spares, self._at_least = nodes, spares, at_least
        self._connected: dict[int, signed_connection.SignedConnection] = {}
        self._hosts: dict[int, str] = {}
        self._training, self._started, self._places = dict[int, int](), list[str](), 0
        self._order = StartRanks(attempt=0, nodes=1, node_rank=0, rendezvous="")
        self._changed, self._is_under_way = threading.Condition(), False
        self._lost, self._vacated, self._orders = dict[int, LostMachine](), set[int](), Counter[int]()
        self._on_lost: OnLost = lambda *, is_enough: None

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
        """Wait until enough machines are connected, at most so long; return how many can train, with the first."""
        deadline = time.monotonic() + wait_seconds
        with self._changed:
            while len(self._connected) < self.nodes - 1 and time.monotonic() < deadline and not is_stopping():
                self._changed.wait(_POLL_SECONDS)
            return min(1 + len(self._connected), self.nodes)

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """Return the names of the other machines that an attempt of `nodes` machines gets."""
        with self._changed:
            return tuple(self._hosts[number] for number in sorted(self._connected)[: nodes - 1])

    def start_ranks(self, attempt: int, nodes: int, rendezvous: str, on_lost: OnLost) -> None:
        """Start the ranks of `nodes` machines; `on_lost` is called for each that fails before its ranks end well."""
        with self._changed:
            self._on_lost, self._training, self._started, self._places = on_lost, {}, [""], nodes - 1
            self._is_under_way = True
            self._lost.clear()
            self._vacated.clear()
            self._orders.clear()
            self._order = StartRanks(attempt=attempt, nodes=nodes, node_rank=0, rendezvous=rendezvous)
            self._fill_places()
            missing, self._places = self._places, 0
        if missing:
            self._lost[0] = LostMachine(what=f"{missing} of {nodes} machines left before the attempt started")
            on_lost(is_enough=True)

    def lost(self) -> LostMachine | None:
        """Return the first machine of this attempt that was lost, and that its ranks have not outlived."""
        return next(iter(self._lost.values()), None)

    def outlive(self, outlived: RanksOutlived) -> None:
        """The ranks go on without those of a machine: one that waits, or the next that comes, joins them."""
        if outlived.machine is not None:
            self._go_on_without(outlived.machine)

    def end_attempt(self) -> LostMachine | None:
        """Have no machine join any more until the next attempt starts; return what `lost` does."""
        with self._changed:
            self._is_under_way, self._places = False, 0
        return self.lost()

    def _go_on_without(self, place: int) -> None:
        with self._changed:
            if not self._is_under_way:
                return
            self._training = {number: own for number, own in self._training.items() if own != place}
            if place not in self._vacated:
                self._vacated.add(place)
                self._places += 1
                self._fill_places()
            left, host = 1 + len(self._training), self._started[place]
            lost = self._lost.pop(place, LostMachine(what=f"machine {host}", host=host, node_rank=place))
            if is_few := left < self._at_least:
                what = f"{lost.what}: {left} left, machines.at_least = {self._at_least}"
                self._lost[place] = msgspec.structs.replace(lost, what=what)
        if is_few:
            self._on_lost(is_enough=False)

    def _fill_places(self) -> None:
        for number, connection in sorted(self._connected.items()):
            if self._places and number not in self._training and self._orders[number] < _MOST_ORDERS:
                self._orders[number] += 1
                self._places -= 1
                self._training[number] = place = len(self._started)
                self._started.append(self._hosts[number])
                order = msgspec.structs.replace(self._order, node_rank=place, joins=place >= self._order.nodes)
                _send(connection, order)

    def end(self, exit_code: int) -> None:
        """Tell every machine that the run ends here."""
        with self._changed:
            connected = list(self._connected.values())
        for connection in connected:
            _send(connection, RunEnded(exit_code=exit_code))

    def _serve(self, peer: signed_connection.SignedConnection) -> None:
        arrival = receive(peer)
        if not isinstance(arrival, Arrival) or not 0 < (number := arrival.node_rank) < self.nodes + self._spares:
            return
        with self._changed:  # a machine that comes back replaces a connection that only seems open
            self._connected[number], self._hosts[number], self._orders[number] = peer, arrival.host, 0
            self._fill_places()
            self._changed.notify_all()
        try:
            while isinstance(ended := receive(peer), RanksEnded):
                if (ended.attempt, ended.node_rank) == (self._order.attempt, self._training.get(number)):
                    self._lose(number, f"the ranks of {{}} ended with exit code {ended.exit_code}", ended.exit_code)
        finally:
            with self._changed:
                if is_gone := self._connected.get(number) is peer:
                    del self._connected[number]
            if is_gone:
                self._lose(number, "{} is gone")

    def _lose(self, number: int, what: str, exit_code: int = 1) -> None:
        with self._changed:
            place = self._training.pop(number, 0)
            if not (place and exit_code):
                return
            if place >= self._order.nodes or exit_code == OUTLIVED_EXIT_CODE:
                self._go_on_without(place)
                return
            host = self._started[place]
            self._lost[place] = LostMachine(what=what.format(f"machine {number}, {host},"), host=host, node_rank=place)
        self._on_lost(is_enough=True)


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
