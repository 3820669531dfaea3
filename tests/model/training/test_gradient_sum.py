"""Which process computes which micro-batch, and the one binary tree along which their gradients are added."""

import itertools
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

from cairn.model.configuration.training import possible_processes, smaller_micro_batch, split_batch
from cairn.model.errors import InvalidInput
from cairn.model.training.gradient_sum import TreeSum, accumulate


def leaves(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(64, generator=generator) * 10.0 ** (index % 7) for index in range(count)]


def tree(values: list[Tensor]) -> Tensor:
    """The definition: the largest power of two below the number of values on the left, the rest on the right."""
    if len(values) == 1:
        return values[0]
    left = 1 << (len(values) - 1).bit_length() - 1
    return tree(values[:left]) + tree(values[left:])


def pushed(values: list[Tensor]) -> Tensor:
    total = TreeSum()
    for value in values:
        total.push([value.clone()])
    return total.total()[0]


@pytest.mark.parametrize("count", range(1, 20))
def test_the_sum_is_that_of_the_tree(count: int) -> None:
    assert torch.equal(pushed(leaves(count)), tree(leaves(count)))


@pytest.mark.parametrize(("count", "processes"), [(8, 2), (8, 4), (12, 3), (6, 6), (16, 8), (5, 5)])
def test_the_sum_of_the_sums_of_whole_subtrees_is_the_same(count: int, processes: int) -> None:
    values, each = leaves(count), count // processes
    parts = [pushed(values[start : start + each]) for start in range(0, count, each)]
    assert torch.equal(pushed(parts), pushed(values))


@pytest.mark.parametrize("count", range(1, 12))
def test_accumulated_gradients_are_the_sum_of_the_tree(count: int) -> None:
    weight, values = nn.Parameter(torch.zeros(64)), leaves(count)
    accumulate([weight], [(weight * value).sum().backward for value in values])
    assert weight.grad is not None and torch.equal(weight.grad, tree(values))


def test_another_order_of_adding_gives_other_bits() -> None:
    values = leaves(7)
    assert not torch.equal(sum(values[1:], values[0]), tree(values))


def rows(parts: tuple[tuple[slice, ...], ...], batch: int) -> list[int]:
    return [row for part in chain(*parts) for row in range(batch)[part]]


@pytest.mark.parametrize(
    ("batch", "micro", "possible"),
    [
        (8, 8, (1,)),
        (8, 4, (1, 2)),
        (8, 1, (1, 2, 4, 8)),
        (12, 2, (1, 3, 6)),
        (9, 4, (1, 3)),
        (15, 4, (1, 2, 4)),
        (5, 1, (1, 5)),
    ],
)
def test_as_many_processes_as_have_whole_subtrees_can_share_a_batch(
    batch: int, micro: int, possible: tuple[int, ...]
) -> None:
    assert possible_processes(batch, micro) == possible
    for processes in possible:
        parts = split_batch(batch, micro, processes=processes)
        assert rows(parts, batch) == list(range(batch)) and len({len(own) for own in parts}) == 1


def test_other_numbers_are_refused_with_those_that_can() -> None:
    with pytest.raises(InvalidInput, match=r"2 processes cannot share 3 micro-batches.*processes that can: 1, 3"):
        split_batch(9, 4, processes=2)


@pytest.mark.parametrize("batch", range(1, 25))
def test_sharded_processes_have_equal_numbers_of_parts_none_larger_than_a_micro_batch(batch: int) -> None:
    for micro, processes in itertools.product(range(1, batch + 1), range(1, 33)):
        parts = split_batch(batch, micro, processes=processes, mode="fsdp")
        assert rows(parts, batch) == list(range(batch)) and len({len(own) for own in parts}) == 1
        assert all(0 <= part.stop - part.start <= micro for part in chain(*parts))


def test_a_smaller_micro_batch_is_one_that_the_same_processes_can_share() -> None:
    assert smaller_micro_batch(12, 4) == 2 and smaller_micro_batch(9, 3, processes=3) is None
    assert smaller_micro_batch(12, 4, processes=3) == 2 and smaller_micro_batch(8, 1) is None
