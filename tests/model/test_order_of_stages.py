"""Weights that change at a step: a stage draws as a fork at its step would, and every source goes on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.model.configuration.data import TrainedBefore
from cairn.model.data.sample_order import Component, SampleOrder
from cairn.model.errors import InvalidInput
from tests.model.forked_orders import MIXED, draws_from, forked, windows_until

STEPS = 40
WEIGHTS = st.lists(st.integers(0, 9).map(float), min_size=3, max_size=3).filter(any)
STAGES = st.dictionaries(st.integers(1, STEPS), WEIGHTS, max_size=4).map(lambda found: dict(sorted(found.items())))


def staged(order: SampleOrder, stages: dict[int, list[float]]) -> SampleOrder:
    later = [tuple(weights[number] for weights in stages.values()) for number in range(len(order.components))]
    parts = zip(order.components, later, strict=True)
    components = tuple(replace(part, later_weights=weights) for part, weights in parts)
    return replace(order, components=components, stages=tuple(stages))


def reweighted(order: SampleOrder, weights: list[float]) -> tuple[Component, ...]:
    return tuple(replace(part, weight=weight) for part, weight in zip(order.components, weights, strict=True))


@given(STAGES)
def test_a_stage_draws_what_a_fork_at_its_step_with_its_weights_would_draw(stages: dict[int, list[float]]) -> None:
    order, expected = MIXED, list[int]()
    for step, weights in stages.items():
        expected += draws_from(order, step - order.before.step)
        order = forked(order, step, components=reweighted(order, weights))
    expected += draws_from(order, STEPS - order.before.step)
    assert windows_until(staged(MIXED, stages), STEPS) == expected


@given(STAGES, st.integers(0, STEPS))
def test_a_step_draws_the_same_windows_whoever_asks_first(stages: dict[int, list[float]], step: int) -> None:
    order = staged(MIXED, stages)
    whole = windows_until(order, STEPS + 1)
    assert order.windows_between(step, STEPS + 1).reshape(-1).tolist() == whole[step * order.global_batch :]
    assert order.windows_of(step).tolist() == whole[step * order.global_batch : (step + 1) * order.global_batch]


@given(STAGES, st.integers(0, STEPS), st.sampled_from([1, 4, 13]))
def test_a_fork_of_a_run_with_stages_neither_repeats_nor_skips_a_window_of_a_source(
    stages: dict[int, list[float]], step: int, batch: int
) -> None:
    parent = staged(MIXED, stages)
    fork = forked(parent, step, global_batch=batch)
    together = windows_until(parent, step) + draws_from(fork, 30)
    for number, part in enumerate(MIXED.components):
        own = [window for window in together if part.first_window <= window < part.end_window]
        assert own == MIXED._windows_of_component(number, np.arange(len(own), dtype=np.int64)).tolist()
    if batch == parent.global_batch:
        assert together == windows_until(parent, step + 30)


def test_each_stage_draws_by_its_weights_and_0_draws_nothing() -> None:
    order = staged(MIXED, {8: [0, 1, 1], 16: [1, 0, 0]})
    ends = [order.component_draws_before(step) for step in (8, 16, 24)]
    assert ends == [(20, 8, 4), (20, 24, 20), (52, 24, 20)]


def test_a_stage_in_data_that_is_new_to_a_fork_begins_at_its_step_of_the_whole_line() -> None:
    new = TrainedBefore(step=10, draws=40, component_draws=(0, 0, 0))
    order = replace(staged(MIXED, {4: [1, 1, 0], 12: [0, 0, 1]}), before=new)
    assert [order.component_draws_before(step) for step in (10, 12, 13)] == [(0, 0, 0), (4, 4, 0), (4, 4, 4)]


@pytest.mark.parametrize("weights", [[0, 0, 0], [1, 1e-12, 1]])
def test_a_stage_without_a_schedule_is_refused(weights: list[float]) -> None:
    with pytest.raises(InvalidInput, match="weights="):
        staged(MIXED, {3: weights})
