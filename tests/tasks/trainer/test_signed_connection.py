"""Who does not know the secret is not listened to, and what is signed can be neither forged nor repeated."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

import pytest

from cairn.tasks.trainer import signed_connection
from cairn.tasks.trainer.signed_connection import ConnectionEnded, NotAdmitted, SignedConnection, admit, greet

SECRET = b"0123456789abcdef0123456789abcdef"
HEAD_BYTES = 8 + 32


@dataclass
class Wire:
    """Two connected ends with somebody between them who sees, and may change, what goes up."""

    upper: socket.socket
    lower: socket.socket
    middle: tuple[socket.socket, socket.socket]


@pytest.fixture
def wire() -> Iterator[Wire]:
    """The lower end connects to the upper one through the middle; what goes down is passed on unchanged."""
    upper, above = socket.socketpair()
    below, lower = socket.socketpair()

    def pass_down() -> None:
        with suppress(OSError):  # closed when the test is over
            while data := above.recv(4096):
                below.sendall(data)

    thread = threading.Thread(target=pass_down)
    thread.start()
    yield Wire(upper, lower, (below, above))
    above.shutdown(socket.SHUT_RDWR)
    thread.join()
    for end in (upper, lower, above, below):
        end.close()


def both(wire: Wire) -> tuple[SignedConnection, SignedConnection]:
    """Return the upper and the lower end after they have proved themselves to each other."""
    with ThreadPoolExecutor() as beside:
        admitted, greeted = beside.submit(admit, wire.upper, SECRET), beside.submit(greet, wire.lower, SECRET)
        pass_up(wire, 64)
        return admitted.result(60), greeted.result(60)


def pass_up(wire: Wire, number: int) -> bytes:
    """Let so many bytes go up; returns them."""
    below, above = wire.middle
    data = below.recv(number, socket.MSG_WAITALL)
    above.sendall(data)
    return data


def test_two_that_know_the_secret_understand_each_other(wire: Wire) -> None:
    upper, lower = both(wire)
    lower.send(b"a question")
    pass_up(wire, HEAD_BYTES + len(b"a question"))
    assert upper.receive() == b"a question"
    upper.send(b"")
    assert lower.receive() == b""


def test_who_does_not_know_the_secret_is_turned_away_by_the_listening_end(wire: Wire) -> None:
    with ThreadPoolExecutor() as beside:
        admitted = beside.submit(admit, wire.upper, SECRET)
        greeted = beside.submit(greet, wire.lower, b"another secret, as long")
        pass_up(wire, 64)
        assert isinstance(admitted.exception(60), NotAdmitted)
        wire.middle[0].shutdown(socket.SHUT_RDWR)
        assert isinstance(greeted.exception(60), ConnectionEnded)


def test_a_listening_end_that_does_not_know_the_secret_is_left(wire: Wire) -> None:
    with ThreadPoolExecutor() as beside:
        greeted = beside.submit(greet, wire.lower, SECRET)
        wire.upper.sendall(bytes(32))
        pass_up(wire, 64)
        wire.upper.sendall(bytes(32))
        with pytest.raises(NotAdmitted, match="the same one"):
            greeted.result(60)


def test_the_proof_of_another_connection_is_none(wire: Wire) -> None:
    with ThreadPoolExecutor() as beside:
        beside.submit(admit, wire.upper, SECRET)
        beside.submit(greet, wire.lower, SECRET)
        recorded = pass_up(wire, 64)
        above, below = socket.socketpair()
        with above, below:
            again = beside.submit(admit, above, SECRET)
            below.sendall(recorded)
            assert isinstance(again.exception(60), NotAdmitted)


def test_a_changed_message_is_refused(wire: Wire) -> None:
    upper, lower = both(wire)
    lower.send(b"add 1")
    below, above = wire.middle
    above.sendall(below.recv(HEAD_BYTES + 5, socket.MSG_WAITALL).replace(b"add 1", b"add 9"))
    with pytest.raises(NotAdmitted):
        upper.receive()


def test_a_repeated_message_is_refused(wire: Wire) -> None:
    upper, lower = both(wire)
    lower.send(b"add 1")
    recorded = pass_up(wire, HEAD_BYTES + 5)
    assert upper.receive() == b"add 1"
    wire.middle[1].sendall(recorded)
    with pytest.raises(NotAdmitted):
        upper.receive()


def test_a_message_sent_back_to_its_sender_is_refused(wire: Wire) -> None:
    upper, _ = both(wire)
    upper.send(b"go")
    sent_back = wire.lower.recv(HEAD_BYTES + 2, socket.MSG_WAITALL)
    wire.middle[1].sendall(sent_back)
    with pytest.raises(NotAdmitted):
        upper.receive()


def test_no_memory_is_made_for_a_message_that_is_too_long(wire: Wire) -> None:
    upper, _ = both(wire)
    wire.middle[1].sendall((1 << 60).to_bytes(8) + bytes(32))
    with pytest.raises(NotAdmitted, match="at most"):
        upper.receive()


def test_either_end_notices_that_the_other_machine_is_silent() -> None:
    peers = SimpleQueue[SignedConnection]()

    def serve(peer: SignedConnection) -> None:
        peers.put(peer)
        peer.receive()

    with signed_connection.listening("127.0.0.1:0", SECRET, serve, print) as port:
        lower = signed_connection.connect(f"127.0.0.1:{port}", SECRET, timeout_seconds=60.0)
        for end in (lower, peers.get(timeout=60.0)):
            with socket.socket(fileno=os.dup(end.fileno())) as same:
                assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        lower.close()
