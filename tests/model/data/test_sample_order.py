"""Which windows each step draws, and the keyed permutation that they are drawn by."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.model.data.sample_order import Component, SampleOrder, permute
from cairn.model.data.token_windows import first_tokens
from cairn.model.errors import InvalidInput

some = settings(max_examples=10, deadline=None)
SIZES = {"window_count": 50, "seed": 9, "global_batch": 7}


PINNED = [8, 29, 36, 31, 43, 41, 9, 21, 24, 6, 38, 32, 1, 34, 30, 13, 44, 19, 21, 3, 11]
THREE = (
    Component(first_window=0, window_count=20, weight=5.0),
    Component(first_window=21, window_count=4, weight=2.0),
    Component(first_window=30, window_count=20, weight=1.0),
)


@st.composite
def mixed_orders(draw, **more):
    """An order over one to four sources with gaps between them."""
    components, start = [], 0
    for _ in range(draw(st.integers(1, 4))):
        start += draw(st.integers(0, 2))
        count, weight = draw(st.integers(2, 15)), float(draw(st.integers(1, 6)))
        components.append(Component(first_window=start, window_count=count, weight=weight))
        start += count
    batch, seed = draw(st.integers(1, 30)), draw(st.integers(0, 2**63 - 1))
    return SampleOrder(window_count=start, seed=seed, global_batch=batch, components=tuple(components), **more)


def of_component(drawn, component):
    return drawn[(drawn >= component.first_window) & (drawn < component.end_window)]


def draws(order, steps):
    """The draws of the first steps: together, which a test below holds against one step after the other."""
    return order.windows_between(0, steps).reshape(-1)


def test_a_batch_does_not_depend_on_what_was_asked_before() -> None:
    warm = SampleOrder(**SIZES)
    draws(warm, 20)
    assert np.array_equal(warm.windows_of(4), SampleOrder(**SIZES).windows_of(4))


def test_each_epoch_has_its_own_order() -> None:
    epochs = draws(SampleOrder(**{**SIZES, "global_batch": 50}), 2).reshape(2, 50)
    assert not np.array_equal(epochs[0], epochs[1])


def test_another_seed_gives_another_order() -> None:
    assert not np.array_equal(SampleOrder(**SIZES).windows_of(0), SampleOrder(**{**SIZES, "seed": 10}).windows_of(0))


def test_the_global_batch_only_cuts_one_stream_of_draws() -> None:
    assert np.array_equal(draws(SampleOrder(**SIZES), 10), draws(SampleOrder(**{**SIZES, "global_batch": 10}), 7))


@some
@given(st.frozensets(st.integers(0, 49), max_size=49))
def test_a_quarantined_window_is_never_drawn(quarantined) -> None:
    order = SampleOrder(**SIZES, quarantined=quarantined)
    assert not quarantined & set(draws(order, 20).tolist())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quarantined": frozenset({50})}, "quarantined=50"),
        ({"quarantined": frozenset(range(50))}, "all 50 windows"),
        ({"components": THREE, "quarantined": frozenset(range(21, 25))}, r"all 4 windows of \[21, 25\)"),
        ({"components": (*THREE, THREE[1])}, r"\[21, 25\) must lie .* overlap no other"),
        ({"components": (Component(first_window=40, window_count=11),)}, r"\[40, 51\) must lie in \[0, 50\)"),
    ],
)
def test_an_order_with_nothing_to_draw_is_refused(changes, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        SampleOrder(**{**SIZES, **changes})


def test_an_order_without_components_is_the_order_of_a_single_one_of_any_weight() -> None:
    single = SampleOrder(**SIZES, components=(Component(first_window=0, window_count=50, weight=7.5),))
    assert np.array_equal(draws(single, 20), draws(SampleOrder(**SIZES), 20))


def test_the_order_of_one_source_is_for_ever_this_one() -> None:
    order = SampleOrder(**SIZES, quarantined=frozenset({14}))
    assert draws(order, 3).tolist() == PINNED


@some
@given(mixed_orders())
def test_every_epoch_of_a_component_draws_each_of_its_windows_exactly_once(order) -> None:
    drawn = draws(order, 200 // order.global_batch)
    for component in order.components:
        mine = of_component(drawn, component)
        epochs = mine[: len(mine) // component.window_count * component.window_count].reshape(
            -1, component.window_count
        )
        expected = np.arange(component.first_window, component.end_window)
        assert all(np.array_equal(np.sort(epoch), expected) for epoch in epochs)


@some
@given(mixed_orders())
def test_no_draw_is_of_a_window_outside_the_components(order) -> None:
    drawn = draws(order, 200 // order.global_batch)
    assert sum(len(of_component(drawn, component)) for component in order.components) == len(drawn)


def test_long_run_shares_are_exactly_the_weights() -> None:
    drawn = draws(SampleOrder(**{**SIZES, "global_batch": 8}, components=THREE), 500)
    assert [len(of_component(drawn, component)) for component in THREE] == [2500, 1000, 500]


@some
@given(mixed_orders(), st.integers(0, 2**40))
def test_steps_drawn_together_are_the_steps_drawn_alone(order, step) -> None:
    together = order.windows_between(step, step + 8)
    assert np.array_equal(together, [order.windows_of(alone) for alone in range(step, step + 8)])


@some
@given(mixed_orders(), st.integers(0, 2**40))
def test_a_far_step_is_drawn_as_a_cut_of_the_same_stream(order, step) -> None:
    one_by_one = replace(order, global_batch=1)
    first = step * order.global_batch
    expected = one_by_one.windows_between(first, first + order.global_batch).reshape(-1)
    assert np.array_equal(order.windows_of(step), expected)


@some
@given(mixed_orders(), st.data())
def test_a_quarantine_moves_no_other_draw_of_any_source(order, data) -> None:
    bad = frozenset(part.first_window + data.draw(st.integers(0, part.window_count - 1)) for part in order.components)
    before, after = draws(order, 5), draws(replace(order, quarantined=bad), 5)
    readable = ~np.isin(before, list(bad))
    assert np.array_equal(before[readable], after[readable]) and not bad & set(after.tolist())


@some
@given(mixed_orders(), st.data())
def test_a_replacement_comes_from_the_source_of_the_window_it_replaces(order, data) -> None:
    part = data.draw(st.sampled_from(order.components))
    clean = replace(order, quarantined=frozenset({part.first_window}))
    assert len(of_component(draws(clean, 5), part)) == len(of_component(draws(order, 5), part))


def test_another_source_at_the_end_leaves_the_permutations_of_the_others_as_they_were() -> None:
    two, three = (SampleOrder(**{**SIZES, "global_batch": 56}, components=THREE[:count]) for count in (2, 3))
    for component in THREE[:2]:
        mine = [of_component(draws(order, 4), component) for order in (two, three)]
        shorter = min(map(len, mine))
        assert np.array_equal(mine[0][:shorter], mine[1][:shorter])


SHIFTED = {**SIZES, "block_size": 8}


def starts(windows):
    return first_tokens(windows, window_count=50, block_size=8)


def epochs_of(order, count):
    return draws(order, -(-count * 50 // 7))[: count * 50].reshape(count, 50)


def test_the_first_epoch_has_no_offset() -> None:
    assert np.array_equal(draws(SampleOrder(**SHIFTED), 7), draws(SampleOrder(**SIZES), 7))


def test_later_epochs_begin_at_other_tokens_until_every_one_had_its_turn() -> None:
    epochs = epochs_of(SampleOrder(**SHIFTED), 9)
    offsets = [sorted(set((starts(epoch) % 8).tolist()) - {0}) for epoch in epochs]
    assert offsets[0] == offsets[8] == [] and sorted(offsets[1:8]) == [[number] for number in range(1, 8)]


def test_every_epoch_draws_each_input_once_but_at_the_end_of_the_text() -> None:
    for epoch in epochs_of(SampleOrder(**SHIFTED), 8):
        first = np.sort(starts(epoch))
        assert (np.diff(first) >= 1).all() and (np.diff(first)[:-1] == 8).all() and first[-1] == 49 * 8


@some
@given(mixed_orders())
def test_no_later_window_leaves_its_source(order) -> None:
    shifted = replace(order, block_size=5)
    drawn = draws(shifted, 200 // order.global_batch)
    first = first_tokens(drawn, window_count=order.window_count, block_size=5)
    homes = [(part.first_window * 5 <= first) & (first <= (part.end_window - 1) * 5) for part in order.components]
    assert (np.sum(homes, axis=0) == 1).all()


@some
@given(st.frozensets(st.integers(0, 50 * 8 - 1), max_size=20))
def test_no_window_that_shares_an_input_with_a_quarantined_one_is_drawn(quarantined) -> None:
    drawn = starts(draws(SampleOrder(**SHIFTED, quarantined=quarantined), 40))
    bad = starts(np.array(sorted(quarantined), dtype=np.int64))
    assert all(abs(int(one) - other) >= 8 for one in bad for other in set(drawn.tolist()))


def test_a_quarantine_of_later_windows_that_leaves_nothing_of_the_first_epoch_is_refused() -> None:
    every_second = frozenset(50 * 4 + window for window in range(0, 50, 2))
    with pytest.raises(InvalidInput, match="all 50 windows"):
        SampleOrder(**SHIFTED, quarantined=every_second)


@some
@given(st.integers(1, 3000), st.text(max_size=8))
def test_every_value_comes_from_exactly_one_position(size, key) -> None:
    values = permute(np.arange(size), size=size, key=key)
    assert np.array_equal(np.sort(values), np.arange(size))


@some
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
