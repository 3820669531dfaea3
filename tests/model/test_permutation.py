"""The keyed permutation."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.model.data.sample_order import permute


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.text(max_size=8))
def test_every_value_comes_from_exactly_one_position(size, key) -> None:
    values = permute(np.arange(size), size=size, key=key)
    assert np.array_equal(np.sort(values), np.arange(size))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 10**15), st.data())
def test_positions_asked_together_or_alone_give_the_same_values(size, data) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=9)), dtype=np.int64)
    alone = [int(permute(positions[i : i + 1], size=size, key="k")[0]) for i in range(len(positions))]
    assert permute(positions, size=size, key="k").tolist() == alone


def test_the_values_of_a_key_never_change_between_versions() -> None:
    assert permute(np.arange(10), size=10, key="draw/1337/0").tolist() == GOLDEN


def test_another_key_permutes_otherwise() -> None:
    first, second = (permute(np.arange(1000), size=1000, key=key) for key in "ab")
    assert (first == second).mean() < 0.02


def test_neighbours_are_scattered() -> None:
    values = permute(np.arange(100_000), size=100_000, key="k")
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


GOLDEN = [5, 4, 9, 7, 8, 0, 3, 2, 6, 1]
