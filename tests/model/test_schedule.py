"""The learning rate of each step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.training.schedule import learning_rate

SETTINGS = {"steps": 110, "warmup_steps": 10, "lr": 1.0, "min_lr": 0.1}


@pytest.mark.parametrize(
    ("step", "rate"), [(1, 0.1), (5, 0.5), (10, 1.0), (60, 0.55), (110, 0.1), (111, 0.1), (10_000, 0.1)]
)
def test_the_rate_warms_up_linearly_and_falls_as_a_cosine_to_its_floor(step, rate):
    assert learning_rate(step, **SETTINGS) == pytest.approx(rate)


def test_a_quarter_of_the_way_down_the_cosine_has_its_value():
    assert learning_rate(35, **SETTINGS) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + 0.5**0.5))


@given(st.integers(1, 200), st.integers(0, 110))
def test_the_rate_is_positive_and_never_above_the_peak(step, warmup_steps):
    assert 0 < learning_rate(step, **{**SETTINGS, "warmup_steps": warmup_steps}) <= 1.0


@given(st.integers(10, 200))
def test_the_rate_never_rises_after_the_warm_up(step):
    assert learning_rate(step + 1, **SETTINGS) <= learning_rate(step, **SETTINGS)
