"""Which windows each step draws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import InvalidInput
from model.sample_order import SampleOrder

SIZES = {"window_count": 50, "seed": 9, "global_batch": 7}


def draws(order, steps):
    return np.concatenate([order.windows_of(step) for step in range(steps)])


def test_a_batch_does_not_depend_on_what_was_asked_before():
    warm = SampleOrder(**SIZES)
    draws(warm, 20)
    assert np.array_equal(warm.windows_of(4), SampleOrder(**SIZES).windows_of(4))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 90), st.integers(0, 2**63 - 1))
def test_every_epoch_draws_every_window_exactly_once(window_count, global_batch, seed):
    order = SampleOrder(window_count=window_count, seed=seed, global_batch=global_batch)
    epochs = draws(order, -(-3 * window_count // global_batch))[: 3 * window_count].reshape(3, window_count)
    assert all(np.array_equal(np.sort(epoch), np.arange(window_count)) for epoch in epochs)


def test_each_epoch_has_its_own_order():
    epochs = draws(SampleOrder(**{**SIZES, "global_batch": 50}), 2).reshape(2, 50)
    assert not np.array_equal(epochs[0], epochs[1])


def test_another_seed_gives_another_order():
    assert not np.array_equal(SampleOrder(**SIZES).windows_of(0), SampleOrder(**{**SIZES, "seed": 10}).windows_of(0))


def test_the_global_batch_only_cuts_one_stream_of_draws():
    assert np.array_equal(draws(SampleOrder(**SIZES), 10), draws(SampleOrder(**{**SIZES, "global_batch": 10}), 7))


def test_the_cursor_counts_draws():
    assert [SampleOrder(**SIZES).cursor_of(step) for step in (0, 1, 30)] == [0, 7, 210]


@settings(max_examples=40, deadline=None)
@given(st.frozensets(st.integers(0, 49), max_size=49))
def test_a_quarantined_window_is_never_drawn(quarantined):
    order = SampleOrder(**SIZES, quarantined=quarantined)
    assert not quarantined & set(draws(order, 20).tolist())


@settings(max_examples=40, deadline=None)
@given(st.frozensets(st.integers(0, 49), max_size=10))
def test_a_quarantine_moves_no_other_draw(quarantined):
    before, after = draws(SampleOrder(**SIZES), 20), draws(SampleOrder(**SIZES, quarantined=quarantined), 20)
    readable = ~np.isin(before, list(quarantined))
    assert np.array_equal(before[readable], after[readable])


def test_a_replacement_is_the_same_every_time():
    orders = [SampleOrder(**SIZES, quarantined=frozenset({3, 30})) for _ in range(2)]
    assert np.array_equal(draws(orders[0], 20), draws(orders[1], 20))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window_count": 0}, "window_count=0"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"quarantined": frozenset({50})}, "quarantined=50"),
        ({"quarantined": frozenset(range(50))}, "all 50 windows"),
    ],
)
def test_an_order_with_nothing_to_draw_is_refused(changes, words):
    with pytest.raises(InvalidInput, match=words):
        SampleOrder(**{**SIZES, **changes})


def test_a_negative_step_is_refused():
    with pytest.raises(InvalidInput, match="step=-1"):
        SampleOrder(**SIZES).windows_of(-1)
