"""The first machine knows which others are here, starts their ranks, and learns of each that is lost."""

import socket
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from cairn.tasks.trainer.machines import Machines, RanksEnded, RunEnded, StartRanks, connect, receive
from cairn.tasks.trainer.signed_connection import SignedConnection
from tests.processes.waiting import wait_until

SECRET = b"0123456789abcdef"
START = StartRanks(attempt=7, nodes=2, node_rank=1, rendezvous="first:4711")


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def machines(address: str) -> Iterator[Machines]:
    """The first of three machines, listening."""
    machines = Machines(3)
    with machines.serving(address, SECRET, print):
        yield machines


def connected(address: str, node_rank: int) -> SignedConnection:
    peer = connect(address, SECRET, node_rank)
    assert peer is not None
    return peer


def here(machines: Machines) -> int:
    return machines.gather(0.0, is_stopping=lambda: False)


def say_ended(peer: SignedConnection, *, attempt: int, exit_code: int) -> None:
    peer.send(msgspec.msgpack.encode(RanksEnded(attempt=attempt, exit_code=exit_code)))


@pytest.fixture
def other(machines: Machines, address: str) -> Iterator[SignedConnection]:
    """One other machine, and it is here."""
    with closing(connected(address, 1)) as peer:
        wait_until(lambda: here(machines) == 2, "the other machine")
        yield peer


def test_a_first_machine_that_does_not_listen_is_not_there(address: str) -> None:
    assert connect(address, SECRET, 1) is None


def test_a_machine_with_another_secret_does_not_come_in(machines: Machines, address: str) -> None:
    assert connect(address, b"another secret..", 1) is None
    assert here(machines) == 1


def test_machines_are_waited_for_until_all_are_here(machines: Machines, other: SignedConnection, address: str) -> None:
    with closing(connected(address, 2)):
        assert machines.gather(1e6, is_stopping=lambda: False) == 3


def test_a_notice_ends_the_wait(machines: Machines, other: SignedConnection) -> None:
    assert machines.gather(1e6, is_stopping=lambda: True) == 2


def test_a_machine_that_hangs_up_is_no_longer_here(machines: Machines, other: SignedConnection) -> None:
    other.close()
    wait_until(lambda: here(machines) == 1, "its end")


def test_a_machine_that_comes_back_takes_the_place_it_had(
    machines: Machines, other: SignedConnection, address: str
) -> None:
    before = machines._connected[1]
    with closing(connected(address, 1)) as again:
        wait_until(lambda: machines._connected[1] is not before, "the machine")
        other.close()
        machines.end(75)
        assert receive(again) == RunEnded(exit_code=75)


def test_a_machine_is_told_where_its_ranks_meet_the_others(machines: Machines, other: SignedConnection) -> None:
    machines.start_ranks(7, 2, "first:4711", lambda what, host: None)
    assert receive(other) == START


def test_machines_that_left_before_the_start_are_lost(machines: Machines, other: SignedConnection) -> None:
    lost = list[tuple[str, str]]()
    machines.start_ranks(7, 3, "first:4711", lambda *said: lost.append(said))
    assert lost == [("1 of 3 machines left before the attempt started", "")]


def test_the_other_machines_of_an_attempt_are_known_by_name(machines: Machines, other: SignedConnection) -> None:
    assert (machines.hosts(2), machines.hosts(1)) == ((socket.gethostname(),), ())


@pytest.mark.parametrize(
    ("attempt", "exit_code", "said"),
    [(7, 1, ["the ranks of {} ended with exit code 1"]), (7, 0, []), (6, 1, ["{} is gone"])],
    ids=["badly", "well", "of the attempt before"],
)
def test_ranks_that_end_badly_in_this_attempt_and_machines_that_are_gone_before_their_ranks_are_lost(
    machines: Machines, other: SignedConnection, attempt: int, exit_code: int, said: list[str]
) -> None:
    lost, host = list[tuple[str, str]](), socket.gethostname()
    machines.start_ranks(7, 2, "first:4711", lambda *said: lost.append(said))
    say_ended(other, attempt=attempt, exit_code=exit_code)
    other.close()
    wait_until(lambda: here(machines) == 1, "its end")
    wait_until(lambda: not machines._training, "its end")
    assert lost == [(words.format(f"machine 1, {host},"), host) for words in said]


def test_an_error_on_the_first_machine_ends_the_others_with_1(address: str) -> None:
    machines = Machines(2)
    with pytest.raises(ZeroDivisionError), machines.serving(address, SECRET, print):
        other = connected(address, 1)
        machines.gather(1e6, is_stopping=lambda: False)
        raise ZeroDivisionError
    assert receive(other) == RunEnded(exit_code=1)
    other.close()
