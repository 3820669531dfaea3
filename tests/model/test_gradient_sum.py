"""Gradients are added along one binary tree, whoever adds which part, with few partial sums at a time."""

import pytest
import torch
from torch import Tensor, nn

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
