"""The place where machines and ranks meet stays open, whoever connects without the secret and whatever runs short."""

import errno
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest

from cairn.tasks.trainer import signed_connection
from cairn.tasks.trainer.signed_connection import MOST_UNPROVEN, SignedConnection, admit, greet, listening
from tests.processes.waiting import patience_seconds, prompt_seconds, wait_until

SECRET = b"0123456789abcdef"
FEW_DESCRIPTORS = """
import resource, sys
from cairn.tasks.trainer.signed_connection import listening
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
def serve(peer):
    while True:
        peer.send(peer.receive())
with listening("127.0.0.1:0", b"0123456789abcdef", serve, lambda line: print(line, flush=True)) as port:
    print(port, flush=True)
    sys.stdin.read()
"""


def echo(peer: SignedConnection) -> None:
    while True:
        peer.send(peer.receive())


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=patience_seconds())


def answers(port: int) -> bool:
    """Whether a connection with the secret is served."""
    with closing(dial(port)) as connection:
        peer = greet(connection, SECRET)
        peer.send(b"hello")
        return peer.receive() == b"hello"


def is_hung_up(connection: socket.socket) -> bool:
    """Wait for the other end to close; True."""
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


@contextmanager
def open_place(said: list[str]) -> Iterator[int]:
    with listening("127.0.0.1:0", SECRET, echo, said.append) as port:
        yield port


def test_idle_connections_do_not_close_it_where_descriptors_run_out() -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FEW_DESCRIPTORS], **pipes) as place, ExitStack() as idle:
        assert place.stdout is not None
        port = int(place.stdout.readline())
        for _ in range(250):
            idle.enter_context(dial(port))
        assert answers(port)
        said, _ = place.communicate()
    assert b"Too many open files" in said


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED])
def test_an_error_of_accept_is_said_once_and_passes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    said, failures, listen = list[str](), [OSError(number, "it failed")] * 2, signed_connection._listener

    class FailingSocket(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if failures:
                raise failures.pop()
            return super().accept()

    monkeypatch.setattr(signed_connection, "_listener", lambda address: FailingSocket(fileno=listen(address).detach()))
    with open_place(said) as port:
        assert answers(port)
    assert len(said) == 1 and "it failed; the next ones are tried" in said[0]


def test_a_connection_that_gets_no_thread_is_closed_and_the_next_one_served(monkeypatch: pytest.MonkeyPatch) -> None:
    said, refused, start = list[str](), [True], threading.Thread.start

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name != "rendezvous" and refused:
            refused.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    with open_place(said) as port:
        with closing(dial(port)) as first:
            assert is_hung_up(first)
        assert answers(port)
    assert "can't start new thread" in said[0]


def test_of_more_than_sixty_four_unproven_connections_the_oldest_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed_connection, "GREETING_SECONDS", 2 * patience_seconds())
    with open_place([]) as port, ExitStack() as idle:
        connections, patience = [], prompt_seconds()
        for _ in range(MOST_UNPROVEN + 3):
            connections.append(idle.enter_context(dial(port)))
            connections[-1].settimeout(patience)
            connections[-1].recv(32, socket.MSG_WAITALL)  # it has a thread now
        assert all(is_hung_up(oldest) for oldest in connections[:3])
        assert answers(port)  # for which the fourth gives way
        connections[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            connections[-1].recv(1)


def test_proven_connections_are_not_counted() -> None:
    with open_place([]) as port, ExitStack() as open_ones:
        peers = [greet(open_ones.enter_context(dial(port)), SECRET) for _ in range(MOST_UNPROVEN + 3)]
        for peer in peers:
            peer.send(b"still here")
            assert peer.receive() == b"still here"


@pytest.mark.parametrize("prove", [admit, greet])
def test_an_end_that_proves_itself_byte_by_byte_has_the_same_time_in_all(
    monkeypatch: pytest.MonkeyPatch, prove: Callable[[socket.socket, bytes], SignedConnection]
) -> None:
    monkeypatch.setattr(signed_connection, "GREETING_SECONDS", 0.2)
    upper, lower = socket.socketpair()
    sent = list[int]()

    def drip() -> None:
        with suppress(OSError):
            for number in range(64):
                lower.send(b"x")
                sent.append(number)
                time.sleep(0.02)

    thread = threading.Thread(target=drip)
    with upper, lower:
        thread.start()
        with pytest.raises(TimeoutError):
            prove(upper, SECRET)
        upper.close()
        thread.join()
    assert len(sent) < 64


def test_a_stranger_is_named_once() -> None:
    said = list[str]()
    with open_place(said) as port:
        for _ in range(3):
            with closing(dial(port)) as stranger:
                stranger.sendall(bytes(64))
                assert is_hung_up(stranger)
        wait_until(lambda: bool(said), "the line")
        assert answers(port)
    assert said == ["127.0.0.1 was not admitted: somebody without the secret has connected"]
