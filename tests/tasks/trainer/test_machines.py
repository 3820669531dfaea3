"""The first machine knows which others are here, starts their ranks, and learns of each that is lost."""

import select
import socket
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
from msgspec import structs

from cairn.tasks.configuration.settings import MachinesConfig
from cairn.tasks.machine.placement import check_machine
from cairn.tasks.policy.failures import OUTLIVED_EXIT_CODE
from cairn.tasks.trainer.machines import (
    LostMachine,
    Machines,
    RanksEnded,
    RunEnded,
    StartRanks,
    connect,
    receive,
)
from cairn.tasks.trainer.signed_connection import ConnectionEnded, SignedConnection
from cairn.tasks.trainer.trainer_protocol import RanksOutlived
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


def say_ended(peer: SignedConnection, *, attempt: int, exit_code: int, node_rank: int = 1) -> None:
    peer.send(msgspec.msgpack.encode(RanksEnded(attempt=attempt, node_rank=node_rank, exit_code=exit_code)))


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
    machines.start_ranks(7, 2, "first:4711", lambda *, is_enough: None)
    assert receive(other) == START


def test_machines_that_left_before_the_start_are_lost(machines: Machines, other: SignedConnection) -> None:
    lost = list[bool]()
    machines.start_ranks(7, 3, "first:4711", lambda *, is_enough: lost.append(is_enough))
    assert lost == [True]
    assert machines.lost() == LostMachine(what="1 of 3 machines left before the attempt started")


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
    host = socket.gethostname()
    machines.start_ranks(7, 2, "first:4711", lambda *, is_enough: None)
    say_ended(other, attempt=attempt, exit_code=exit_code)
    other.close()
    wait_until(lambda: here(machines) == 1, "its end")
    wait_until(lambda: not machines._training, "its end")
    lost = [LostMachine(what=words.format(f"machine 1, {host},"), host=host, node_rank=1) for words in said]
    wait_until(lambda: machines.lost() == next(iter(lost), None), "the machine")


def test_an_error_on_the_first_machine_ends_the_others_with_1(address: str) -> None:
    machines = Machines(2)
    with pytest.raises(ZeroDivisionError), machines.serving(address, SECRET, print):
        other = connected(address, 1)
        machines.gather(1e6, is_stopping=lambda: False)
        raise ZeroDivisionError
    assert receive(other) == RunEnded(exit_code=1)
    other.close()


def test_a_machine_that_waits_takes_the_place_of_one_that_was_outlived_under_a_new_number(
    machines: Machines, other: SignedConnection, address: str
) -> None:
    with closing(connected(address, 2)) as spare:
        wait_until(lambda: here(machines) == 3, "the spare")
        machines.start_ranks(7, 2, "first:4711", lambda *, is_enough: None)
        assert receive(other) == START
        machines.outlive(RanksOutlived(ranks=(9,), machine=1))
        assert receive(other) == structs.replace(START, node_rank=2, joins=True), "it is connected, so it is next"
        machines.outlive(RanksOutlived(ranks=(9,), machine=2))
        assert receive(other) == structs.replace(START, node_rank=3, joins=True)
        other.close()
        wait_until(lambda: here(machines) == 2, "its end")
        machines.outlive(RanksOutlived(ranks=(9,), machine=3))
        assert receive(spare) == structs.replace(START, node_rank=4, joins=True)


def test_a_machine_that_comes_back_joins_the_attempt_that_goes_on_without_it(
    machines: Machines, other: SignedConnection, address: str
) -> None:
    machines.start_ranks(7, 2, "first:4711", lambda *, is_enough: None)
    other.close()
    wait_until(lambda: machines.lost() is not None, "its end")
    machines.outlive(RanksOutlived(ranks=(9,), machine=1))
    assert machines.lost() is None
    with closing(connected(address, 1)) as again:
        assert receive(again) == structs.replace(START, node_rank=2, joins=True)
    wait_until(lambda: here(machines) == 1, "its end")
    assert machines.lost() is None, "one that had joined is the ranks' affair"


def test_fewer_machines_than_are_enough_end_the_attempt_though_the_ranks_would_go_on(address: str) -> None:
    machines, ends = Machines(2, at_least=2), list[bool]()
    with machines.serving(address, SECRET, print), closing(connected(address, 1)) as other:
        wait_until(lambda: here(machines) == 2, "the other")
        machines.start_ranks(7, 2, "first:4711", lambda *, is_enough: ends.append(is_enough))
        other.close()
        wait_until(lambda: here(machines) == 1, "its end")
        machines.outlive(RanksOutlived(ranks=(9,), machine=1))
    lost = machines.lost()
    assert lost is not None and lost.what.endswith("1 left, machines.at_least = 2")
    assert not ends[-1]


def join_in_vain(peer: SignedConnection) -> int:
    """End the ranks of a machine as often as it is to start some that join; return how often that was."""
    for times in range(100):
        if not select.select([peer], [], [], 0.5)[0]:
            return times
        order = receive(peer)
        assert isinstance(order, StartRanks) and order.joins
        say_ended(peer, attempt=7, exit_code=OUTLIVED_EXIT_CODE, node_rank=order.node_rank)
    return 100


def test_a_machine_whose_ranks_end_each_time_joins_no_more_until_it_comes_back(
    machines: Machines, other: SignedConnection, address: str
) -> None:
    machines.start_ranks(7, 2, "first:4711", lambda *, is_enough: None)
    assert receive(other) == START
    machines.outlive(RanksOutlived(ranks=(9,), machine=1))
    assert join_in_vain(other) == 7, "it was asked once before"
    with closing(connected(address, 1)) as again:
        order = receive(again)
        assert isinstance(order, StartRanks) and order.joins


def test_another_machine_joins_where_one_has_tried_in_vain(
    machines: Machines, other: SignedConnection, address: str
) -> None:
    machines.start_ranks(7, 2, "first:4711", lambda *, is_enough: None)
    receive(other)
    machines.outlive(RanksOutlived(ranks=(9,), machine=1))
    with closing(connected(address, 2)) as spare:
        join_in_vain(other)
        order = receive(spare)
        assert isinstance(order, StartRanks) and order.joins


def test_ranks_that_the_others_go_on_without_are_no_reason_to_end_the_attempt(
    machines: Machines, other: SignedConnection
) -> None:
    machines.start_ranks(7, 2, "first:4711", lambda *, is_enough: None)
    assert receive(other) == START
    say_ended(other, attempt=7, exit_code=OUTLIVED_EXIT_CODE)
    assert receive(other) == structs.replace(START, node_rank=2, joins=True)
    assert machines.lost() is None


def test_a_machine_that_joins_in_vain_is_not_among_those_that_are_enough(address: str) -> None:
    machines, ends = Machines(2, spares=1, at_least=2), list[bool]()
    with machines.serving(address, SECRET, print), closing(connected(address, 1)) as other:
        wait_until(lambda: here(machines) == 2, "the other")
        machines.start_ranks(7, 2, "first:4711", lambda *, is_enough: ends.append(is_enough))
        with closing(connected(address, 2)) as spare:
            wait_until(lambda: 2 in machines._connected, "the spare")
            other.close()
            wait_until(lambda: machines.lost() is not None, "its end")
            machines.outlive(RanksOutlived(ranks=(9,), machine=1))
            assert machines.lost() is None, "the spare is one of two"
            join_in_vain(spare)
            wait_until(lambda: machines.lost() is not None, "that it is not")
    assert not ends[-1]


def test_no_machine_joins_an_attempt_that_is_over(machines: Machines, other: SignedConnection) -> None:
    machines.start_ranks(7, 2, "first:4711", lambda *, is_enough: None)
    assert receive(other) == START
    machines.outlive(RanksOutlived(ranks=(9,), machine=1))
    receive(other)
    machines.end_attempt()
    say_ended(other, attempt=7, exit_code=1, node_rank=2)
    assert join_in_vain(other) == 0


def test_an_end_of_ranks_that_were_replaced_is_not_that_of_those_that_joined(
    machines: Machines, other: SignedConnection
) -> None:
    machines.start_ranks(7, 2, "first:4711", lambda *, is_enough: None)
    machines.outlive(RanksOutlived(ranks=(9,), machine=1))
    say_ended(other, attempt=7, exit_code=-9)
    other.close()
    wait_until(lambda: here(machines) == 1, "its end")
    assert not machines._training


def test_more_machines_than_train_may_wait_and_are_not_waited_for(address: str) -> None:
    machines = Machines(2, spares=1)
    with machines.serving(address, SECRET, print), closing(connected(address, 2)):
        wait_until(lambda: here(machines) == 2, "the spare, which is as good as any")
        with closing(connected(address, 3)) as stranger, pytest.raises(ConnectionEnded):
            receive(stranger)


@pytest.mark.parametrize("command", ["", "true"])
def test_a_machine_without_a_check_or_with_one_that_succeeds_joins(command: str) -> None:
    assert check_machine(MachinesConfig(check=command)) == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sh -c 'echo ECC errors; exit 3'", "left with 3: ECC errors"),
        ("/no/such/program", "No such file"),
        ("'", "No closing quotation"),
        ("sleep 60", "timed out"),
    ],
    ids=["fails", "is not there", "cannot be read", "takes too long"],
)
def test_a_check_that_does_not_succeed_says_why(command: str, said: str) -> None:
    why = check_machine(MachinesConfig(check=command, wait_seconds=0.5))
    assert why.startswith(f"machines.check of {socket.gethostname()} ") and said in why
