"""When a loss has exploded, and when it has not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.training.loss_history import BASELINE, find_spike

FALLING = [5.0 - 0.01 * step for step in range(BASELINE)]


def ask(losses):
    return find_spike(losses, patience=8, rise=1.5)


def test_a_loss_that_rises_and_stays_is_a_spike():
    spike = ask([*FALLING, *[7.0] * 8])
    assert spike is not None
    assert (spike.steps, spike.level) == (8, 7.0)


@pytest.mark.parametrize("tail", [[7.0] * 7 + [4.4], [4.4] * 8, [5.5] * 8, [30.0] + [4.4] * 7])
def test_one_bad_step_a_plateau_and_a_small_rise_are_none(tail):
    assert ask([*FALLING, *tail]) is None


def test_too_short_a_history_tells_nothing():
    assert ask([*FALLING[1:], *[9.0] * 8]) is None


@given(st.lists(st.floats(0.0, 10.0), min_size=BASELINE + 8, max_size=BASELINE + 40))
def test_a_spike_lies_above_its_baseline_in_every_step(losses):
    spike = ask(losses)
    if spike is not None:
        assert all(loss > spike.baseline + 1.5 for loss in losses[-8:])
