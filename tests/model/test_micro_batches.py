"""Which process computes which micro-batch, and how many processes can share a batch without changing its sum."""

import itertools
from itertools import chain

import pytest

from cairn.model.configuration.training import possible_processes, smaller_micro_batch, split_batch
from cairn.model.errors import InvalidInput


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
