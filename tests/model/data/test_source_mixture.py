"""Which source each draw comes from."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.model.configuration.data import DataConfig, draw_shares, require_short_period
from cairn.model.data.sample_order import split_draws, window_range
from cairn.model.data.token_windows import TokenWindows
from cairn.model.errors import InvalidInput

WEIGHTS = st.lists(st.decimals(min_value="0.01", max_value=9, places=2).map(float), min_size=1, max_size=6)
SMALL_WEIGHTS = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=6)
FAR = st.integers(0, 2**50)


def split(weights, first, count):
    return split_draws(draw_shares(weights), np.arange(first, first + count, dtype=np.int64))


def counts(shares, draws):
    """Return how many of the first `draws` draws each component has, in closed form."""
    remaining, found = draws, []
    for component, share in enumerate(shares):
        total = sum(shares[component:])
        found.append((2 * remaining * share + total) // (2 * total) if share < total else remaining)
        remaining -= found[-1]
    return found


@given(SMALL_WEIGHTS, FAR)
def test_every_period_gives_each_component_exactly_its_share(weights, start) -> None:
    shares = draw_shares(weights)
    chosen, _ = split(weights, start, sum(shares))
    assert tuple(np.bincount(chosen, minlength=len(weights))) == shares


@given(WEIGHTS, FAR)
def test_counts_stay_within_half_a_draw_for_each_component_of_their_share(weights, draws) -> None:
    shares = draw_shares(weights)
    wanted = [Fraction(draws * share, sum(shares)) for share in shares]
    strays = [abs(count - share) for count, share in zip(counts(shares, draws), wanted, strict=True)]
    assert sum(counts(shares, draws)) == draws and max(strays) <= Fraction(len(weights), 2)


@given(WEIGHTS, FAR, st.integers(1, 40))
def test_the_draws_of_a_component_are_numbered_without_gaps_from_its_count(weights, first, count) -> None:
    chosen, own = split(weights, first, count)
    before = counts(draw_shares(weights), first)
    for component, start in enumerate(before):
        mine = own[chosen == component]
        assert np.array_equal(mine, np.arange(start, start + len(mine)))


@given(WEIGHTS, FAR, st.integers(1, 40))
def test_a_draw_asked_for_alone_is_the_one_found_in_sequence(weights, first, count) -> None:
    chosen, own = split(weights, first, count)
    alone = [split(weights, draw, 1) for draw in range(first, first + count)]
    assert [(int(c[0]), int(o[0])) for c, o in alone] == list(zip(chosen.tolist(), own.tolist(), strict=True))


def test_only_the_ratio_of_weights_counts() -> None:
    assert draw_shares((0.1, 0.3)) == draw_shares((2.0, 6.0)) == (1, 3)


def test_equal_weights_alternate() -> None:
    assert split((1.0, 1.0), 0, 6)[0].tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("weights", [(), (1.0, 1e-12)])
def test_weights_without_a_schedule_are_refused(weights) -> None:
    with pytest.raises(InvalidInput, match="weights"):
        require_short_period(weights)


def test_shares_are_exact_where_the_weights_are_too_great_to_be_added_up() -> None:
    (stage,) = DataConfig(sources=("a", "b"), weights=(1e308, 1e308)).mixture
    assert stage.shares == {"a": 0.5, "b": 0.5}


@given(st.lists(st.integers(20, 60), min_size=1, max_size=5), st.integers(1, 8))
def test_every_window_of_a_component_lies_in_its_source_and_no_other_does(token_counts, block_size) -> None:
    stream = np.repeat(np.arange(len(token_counts)), token_counts).astype(np.uint16)
    windows = TokenWindows([stream], block_size, 10)
    gathered = windows.gather(np.arange(windows.window_count))
    whole = [set(np.flatnonzero((gathered == source).all(axis=1))) for source in range(len(token_counts))]
    starts = np.cumsum([0, *token_counts[:-1]]).tolist()
    ranges = [window_range(start, tokens, block_size) for start, tokens in zip(starts, token_counts, strict=True)]
    assert whole == [set(range(first, first + count)) for first, count in ranges]


def test_a_single_source_keeps_every_window() -> None:
    windows = TokenWindows([np.zeros(401, dtype=np.uint16)], 8, 10)
    assert window_range(0, 401, 8) == (0, windows.window_count)
