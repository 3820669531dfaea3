"""Ranks that lost one meet until they are connected, but not for ever, and go on from the newest position."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch

from cairn.model.training import parallel
from cairn.model.training.membership import MeetingNumber, Members, Position, SharesChanged
from cairn.model.training.parallel import Ranks

LOSS = RuntimeError("Connection reset by peer")
TWO = Members(changes=1, ranks=(0, 2))
HERE = Position(rounds=2, members=(0, 1, 2))
AHEAD = replace(HERE, rounds=3, result=torch.tensor([7]).numpy().tobytes())


@dataclass
class Place:
    """A meeting place with these members, at which others are lost in the first meetings."""

    found: Members = TWO
    lost: int = 0
    position: Position = HERE
    met: list[MeetingNumber] = field(default_factory=list)
    is_waiting: bool = False
    is_called: bool = False

    def members(self) -> Members:
        return self.found

    def mark(self, rank: int, *, is_waiting: bool) -> None:
        self.is_waiting = is_waiting

    def is_due(self, last: MeetingNumber) -> bool:
        return self.is_called

    def exchange(self, number: MeetingNumber, rank: int, own: Position) -> Sequence[Position] | None:
        self.met.append(number)
        return None if len(self.met) <= self.lost else (own, self.position)

    def store(self, number: MeetingNumber) -> MeetingNumber:
        return number


@dataclass
class Network:
    """What stands in for torch's connections, of which the first fail; notes the size and seconds of each."""

    failures: int = 0
    tried: list[tuple[int, float]] = field(default_factory=list)
    is_connected: bool = False

    def connect(self, backend: str, store: Any, rank: int, size: int, limit: timedelta) -> None:
        self.tried.append((size, limit.total_seconds()))
        if size > 1 and len(self.tried) <= 2 * self.failures:
            raise TimeoutError
        self.is_connected = True

    def disconnect(self) -> None:
        self.is_connected = False


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(parallel, "_connect", network.connect)
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: network.is_connected)
    monkeypatch.setattr(parallel.dist, "destroy_process_group", network.disconnect)
    return network


def ranks_at(place: Any, own: int = 2) -> Ranks:
    return Ranks(rank=own, size=3, place=place, position=HERE)


def lose() -> None:
    raise LOSS


def test_those_that_are_left_have_ranks_of_their_own_and_wait_no_more(network: Network) -> None:
    ranks = ranks_at(place := Place())
    assert not ranks._exchange(lose)
    assert (ranks.rank, ranks.size, ranks.members, ranks.meeting) == (1, 2, (0, 2), (1, 0))
    assert (network.tried, place.is_waiting) == ([(2, 2.0)], False)


def test_a_meeting_that_another_loss_ends_is_followed_by_the_next(network: Network) -> None:
    ranks = ranks_at(place := Place(lost=2))
    assert not ranks._exchange(lose)
    assert (place.met, len(network.tried)) == ([(1, 0), (1, 1), (1, 2)], 1)


def test_those_that_do_not_connect_try_again_for_longer_each_after_a_group_of_its_own(network: Network) -> None:
    network.failures = 2
    ranks = ranks_at(place := Place())
    assert not ranks._exchange(lose)
    week = timedelta(days=7).total_seconds()
    assert network.tried == [(2, 2.0), (1, week), (2, 3.0), (1, week), (2, 4.0)] and len(place.met) == 3


def test_those_that_never_connect_give_up_with_the_loss(network: Network) -> None:
    network.failures = 1000
    with pytest.raises(RuntimeError, match="reset by peer"):
        ranks_at(place := Place())._exchange(lose)
    assert len(place.met) == 20


def test_where_the_end_of_all_has_begun_nobody_is_met(network: Network) -> None:
    with pytest.raises(RuntimeError, match="reset by peer"):
        ranks_at(place := Place(found=TWO.ended()))._exchange(lose)
    assert (place.met, network.tried) == ([], [])


def test_an_error_of_this_program_is_no_loss_of_another(network: Network) -> None:
    def fail() -> None:
        raise RuntimeError("tensors of different sizes")

    with pytest.raises(RuntimeError, match="different sizes"):
        ranks_at(place := Place())._exchange(fail)
    assert (place.met, place.is_waiting) == ([], False)


def test_one_that_is_left_alone_is_all_members(network: Network) -> None:
    ranks = ranks_at(Place(found=Members(changes=2, ranks=(2,))))
    assert not ranks._exchange(lose)
    assert (ranks.size, ranks.position) == (1, replace(HERE, members=(2,)))


@pytest.mark.parametrize(("position", "known"), [(AHEAD, True), (HERE, False)], ids=["one knows it", "nobody does"])
def test_the_result_of_a_broken_round_is_taken_from_a_rank_that_knows_it(
    network: Network, position: Position, known: bool
) -> None:
    result = torch.zeros(1, dtype=torch.int64)
    assert ranks_at(Place(position=position))._agree(result, lose) == known
    assert result.tolist() == [7 if known else 0]


@pytest.fixture
def broken_once(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round breaks; in the next ones no rank has a larger number than this one."""
    rounds = count()

    def reduce(number: torch.Tensor, operation: object) -> None:
        if next(rounds) == 0:
            raise LOSS

    monkeypatch.setattr(parallel.dist, "all_reduce", reduce)


@pytest.mark.usefixtures("broken_once")
def test_a_question_that_is_no_part_of_a_step_is_asked_again_after_a_loss() -> None:
    assert ranks_at(Place()).largest(5.0) == 5.0


@pytest.mark.usefixtures("broken_once")
def test_a_question_within_a_step_ends_it_since_the_shares_are_others_after_a_loss() -> None:
    ranks = ranks_at(Place())
    with pytest.raises(SharesChanged):
        ranks.any_in_step(True)
    assert ranks.any_in_step(True)


def test_a_rank_that_waits_for_work_comes_to_a_meeting_that_is_due(network: Network) -> None:
    ranks = ranks_at(place := Place())
    for place.is_called in (False, True):
        ranks.attend()
    assert (place.met, ranks.members) == ([(1, 0)], (0, 2))
