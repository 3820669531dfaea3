"""The store by which ranks of several machines meet keeps the promises of torch's own, and lets nobody else in."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, Store

from cairn.model.training.parallel import is_peer_loss
from cairn.tasks.errors import TaskError
from cairn.tasks.trainer.rank_store import Meetings, RankStore, open_rank_store
from cairn.tasks.trainer.rank_values import FolderValues, MemoryValues, RemoteValues, WaitingMarks, serving_rendezvous

SECRET = b"0123456789abcdef"


@contextmanager
def joined(address: str, rank: int) -> Iterator[RankStore]:
    with closing(RemoteValues(address, SECRET, rank)) as values:
        yield RankStore(values)


@pytest.fixture
def address() -> Iterator[str]:
    """A server on a free port of the loopback."""
    with serving_rendezvous("127.0.0.1:0", SECRET, MemoryValues()) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture(params=["folder", "remote"])
def store(request: pytest.FixtureRequest, address: str, tmp_path: Path) -> Iterator[Store]:
    if request.param == "folder":
        yield RankStore(FolderValues(tmp_path / "store"))
    else:
        with joined(address, 0) as store:
            yield store


def test_what_is_set_is_there_and_the_rest_is_not(store: Store) -> None:
    store.set("a", "1")
    store.set("a", "2")
    assert store.get("a") == b"2"
    assert store.check(["a"]) and not store.check(["a", "b"])


def test_a_number_is_added_to(store: Store) -> None:
    assert [store.add("n", 2), store.add("n", 0), store.add("n", -1)] == [2, 2, 1]
    assert store.get("n") == b"1"


@pytest.mark.parametrize(
    ("expected", "desired", "there"), [("", "new", b"new"), ("1", "new", b"new"), ("2", "new", b"1")]
)
def test_a_value_is_replaced_only_where_the_expected_one_is_there(
    store: Store, expected: str, desired: str, there: bytes
) -> None:
    if expected:
        store.set("a", "1")
    assert store.compare_set("a", expected, desired) == there
    assert store.get("a") == there


def test_a_deleted_key_is_gone(store: Store) -> None:
    store.set("a", "1")
    assert store.delete_key("a") and not store.delete_key("a")
    assert not store.check(["a"])


def test_who_waits_for_what_nobody_says_is_told_so_in_time(store: Store) -> None:
    with pytest.raises(TimeoutError, match="no value for b"):
        store.wait(["b"], timedelta(milliseconds=1))


def test_a_meeting_that_is_over_is_waited_for_no_longer(tmp_path: Path) -> None:
    store = RankStore(FolderValues(tmp_path), is_over=lambda: True)
    with pytest.raises(TimeoutError, match="no value for b"):
        store.wait(["b"], timedelta(days=1))


def test_each_rank_joins_once(address: str) -> None:
    with (
        joined(address, 0),
        joined(address, 1),
        pytest.raises(TaskError, match="rank 1 has joined this"),
        joined(address, 1),
    ):
        pass


def test_a_store_whose_connection_is_lost_counts_as_a_lost_peer_at_a_meeting_too(address: str, tmp_path: Path) -> None:
    with joined(address, 0) as store:
        assert isinstance(store.values, RemoteValues)
        store.values._peer._connection.shutdown(socket.SHUT_RDWR)
        meetings = Meetings(store, WaitingMarks(tmp_path / "marks"))
        for ask in (lambda: store.check(["a"]), meetings.members, lambda: meetings.is_due((0, 0))):
            with pytest.raises(DistNetworkError, match="launcher is gone") as lost:
                ask()
            assert is_peer_loss(lost.value)


def test_who_has_another_secret_does_not_come_in(address: str) -> None:
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.recv(32, socket.MSG_WAITALL)
        stranger.sendall(bytes(64) + b"\x84\xa9operation\xa3set")
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "hung up without a word"


def test_the_launcher_says_by_the_environment_which_store_it_is(address: str, tmp_path: Path) -> None:
    one_machine = open_rank_store({"CAIRN_RANK_STORE": str(tmp_path / "store")}, rank=0)
    variables = {"CAIRN_RENDEZVOUS": address, "CAIRN_RENDEZVOUS_SECRET": SECRET.decode()}
    several = open_rank_store(variables, rank=0)
    assert isinstance(one_machine.values, FolderValues) and isinstance(several.values, RemoteValues)
    several.values.close()
