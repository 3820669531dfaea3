"""Any number of ranks can share a step: each has a subtree of the one sum over micro-batches."""

from itertools import pairwise

import pytest
import torch

from cairn.model.configuration.training import possible_processes, split_batch
from cairn.model.errors import StateMismatch
from cairn.model.training import parallel
from cairn.model.training.gradient_sum import TreeSum
from cairn.model.training.membership import Members, Position, newcomers, next_meeting, share_passes
from cairn.model.training.parallel import Ranks

COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 20, 24, 33]


def summed(values: list[torch.Tensor], shares: tuple[range, ...]) -> torch.Tensor:
    """The sum as ranks with these shares add it up."""
    every = TreeSum()
    for share in shares:
        own = TreeSum()
        for number in share:
            own.push([values[number].clone()])
        every.push(own.total(), level=len(share).bit_length() - 1)
    return every.total()[0]


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_ranks_shares_all_micro_batches_and_adds_up_the_same_bits(count: int) -> None:
    values = list(torch.randn(count, 50, generator=torch.Generator().manual_seed(count)))
    alone = summed(values, (range(count),))
    for ranks in range(1, count + 1):
        shares = share_passes(count, ranks)
        assert [number for share in shares for number in share] == list(range(count)) and all(shares)
        assert torch.equal(summed(values, shares), alone), f"{ranks} ranks"


@pytest.mark.parametrize("count", COUNTS)
def test_as_many_ranks_as_a_run_may_begin_with_have_the_shares_they_begin_with(count: int) -> None:
    for ranks in possible_processes(count, 1):
        own = [[part.start for part in parts] for parts in split_batch(count, 1, processes=ranks)]
        assert [list(share) for share in share_passes(count, ranks)] == own


def test_after_a_loss_ranks_have_the_shares_of_any_number() -> None:
    ranks = Ranks(1, 3, meeting=(1, 0))
    rows = ranks.shares(7, 2)
    assert [[(part.start, part.stop) for part in parts] for parts in rows] == [[(0, 2)], [(2, 4)], [(4, 6), (6, 7)]]
    assert ranks.rows(7, 2) == slice(2, 4)


def test_ranks_of_unequal_shares_exchange_the_sum_that_one_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    values = list(torch.randn(8, 500, generator=torch.Generator().manual_seed(8)))
    shares = share_passes(8, 5)
    own = [summed(values[share.start : share.stop], (range(len(share)),)) for share in shares]

    def receive(received: torch.Tensor, given: torch.Tensor) -> None:
        received.copy_(torch.cat([each[:100] for each in own]))  # the first part of everybody's

    def gather(every: torch.Tensor, part: torch.Tensor) -> None:
        every[:100] = part

    monkeypatch.setattr(parallel.dist, "all_to_all_single", receive)
    monkeypatch.setattr(parallel.dist, "all_gather_single", gather)
    parameter = torch.nn.Parameter(torch.zeros(500))
    parameter.grad = own[0].clone()
    Ranks(0, 5, meeting=(1, 0)).add_up([parameter], [len(share) for share in shares])
    assert torch.equal(parameter.grad[:100], summed(values, (range(8),))[:100])


def test_meetings_are_counted_on_and_begin_anew_where_members_change() -> None:
    numbers = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    changes = [0, 0, 1, 1]
    assert all(
        next_meeting(last, change) == after for (last, after), change in zip(pairwise(numbers), changes, strict=True)
    )


def test_who_waits_becomes_a_member_once_for_each_admission_and_not_after_the_end() -> None:
    members = Members(changes=3, ranks=(0, 2)).with_waiting(4).with_waiting(5)
    admitted = Members(changes=4, ranks=(0, 2, 4, 5), admissions=1)
    assert members.admitted(1) == admitted == admitted.admitted(1), "rank 0 may ask twice"
    assert admitted.admitted(2) == Members(changes=5, ranks=(0, 2, 4, 5), admissions=2), "it is made if nobody waits"
    assert members.ended().with_waiting(6).admitted(1).ranks == ()


def test_ranks_that_are_gone_are_neither_members_nor_wait_and_only_a_lost_member_is_a_change() -> None:
    members = Members(changes=3, ranks=(0, 2), waiting=(4, 5))
    assert members.without([5]) == Members(changes=3, ranks=(0, 2), waiting=(4,))
    assert members.without([2, 4]) == Members(changes=4, ranks=(0,), waiting=(5,))


def test_newcomers_are_the_members_that_have_taken_part_in_no_round() -> None:
    assert newcomers((0, 2, 5), Position(rounds=9, members=(0, 1, 2))) == (5,)
    assert newcomers((0, 2, 5), Position(rounds=10, members=(0, 2, 5))) == ()


def test_a_state_that_is_not_the_others_after_it_was_handed_over_ends_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gather(every: torch.Tensor, own: torch.Tensor) -> None:
        every.copy_(torch.tensor([7, 8]))

    monkeypatch.setattr(parallel.dist, "all_gather_single", gather)
    ranks = Ranks(0, 2, members=(0, 4), position=Position(rounds=5, members=(0, 1)))
    with pytest.raises(StateMismatch, match="other bits after a state was handed over: 2 digests"):
        ranks._take_in(lambda: None, lambda: torch.tensor([7]))
