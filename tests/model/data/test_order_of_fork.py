"""Which windows forks and stages draw: what the run before had not drawn, with another batch, other weights or data.

A stage, whose weights begin at a step, draws as a fork at that step would.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.model.configuration.data import TrainedBefore
from cairn.model.data.sample_order import Component, SampleOrder
from cairn.model.errors import InvalidInput

PARENT = SampleOrder(window_count=50, seed=9, global_batch=4)
MIXED = SampleOrder(
    window_count=50,
    seed=9,
    global_batch=4,
    components=(
        Component(first_window=0, window_count=20, weight=5.0),
        Component(first_window=21, window_count=4, weight=2.0),
        Component(first_window=30, window_count=20, weight=1.0),
    ),
)
STEP = 7


def forked(order: SampleOrder, step: int = STEP, **changes: object) -> SampleOrder:
    """Return the order of a fork at a step, as `fork_run` would count what lies before it."""
    draws = order.before.draws + (step - order.before.step) * order.global_batch
    drawn = order.component_draws_before(step)
    return replace(order, before=TrainedBefore(step=step, draws=draws, component_draws=drawn), **changes)  # type: ignore[arg-type]


def draws_from(order: SampleOrder, steps: int) -> list[int]:
    first = order.before.step
    return order.windows_between(first, first + steps).reshape(-1).tolist()


def windows_until(order: SampleOrder, step: int) -> list[int]:
    return order.windows_between(0, step).reshape(-1).tolist()


@pytest.mark.parametrize("parent", [PARENT, MIXED], ids=["whole", "mixed"])
def test_an_unchanged_fork_draws_what_its_parent_would_have_drawn(parent: SampleOrder) -> None:
    assert draws_from(forked(parent), 40) == parent.windows_between(STEP, STEP + 40).reshape(-1).tolist()


@pytest.mark.parametrize("batch", [1, 2, 8, 13])
@pytest.mark.parametrize("parent", [PARENT, MIXED], ids=["whole", "mixed"])
def test_a_fork_with_another_batch_neither_repeats_nor_skips_a_draw(parent: SampleOrder, batch: int) -> None:
    fork = forked(parent, global_batch=batch)
    together = windows_until(parent, STEP) + draws_from(fork, 40)
    assert together == windows_until(parent, len(together) // 4 + 1)[: len(together)]


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 1.0, 6.0), (9.0, 0.5, 0.5)], ids=str)
def test_a_fork_with_other_weights_goes_on_in_each_source_where_its_parent_stopped(
    weights: tuple[float, ...],
) -> None:
    components = reweighted(MIXED, list(weights))
    together = windows_until(MIXED, STEP) + draws_from(forked(MIXED, components=components), 60)
    for number, part in enumerate(components):
        own = [window for window in together if part.first_window <= window < part.end_window]
        expected = MIXED._windows_of_component(number, np.arange(len(own), dtype=np.int64)).tolist()
        assert own == expected, number


def test_a_fork_of_a_fork_counts_what_both_have_drawn() -> None:
    child = forked(MIXED, global_batch=8)
    grandchild = forked(child, STEP + 5, global_batch=3)
    together = windows_until(MIXED, STEP) + draws_from(child, 5) + draws_from(grandchild, 10)
    assert together == windows_until(MIXED, len(together) // 4 + 1)[: len(together)]
    assert grandchild.before.draws == STEP * 4 + 5 * 8 == sum(grandchild.before.component_draws)


def test_data_that_is_new_to_a_fork_begins_with_its_first_epoch() -> None:
    fork = replace(PARENT, before=TrainedBefore(step=STEP, draws=28, component_draws=(0,)))
    assert draws_from(fork, 12) == windows_until(PARENT, 12)


def test_draws_of_another_number_of_sources_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must be one number for each of 1 components"):
        replace(PARENT, before=TrainedBefore(step=STEP, draws=28, component_draws=(14, 14)))


STEPS = 40
some = settings(max_examples=12, deadline=None)
WEIGHTS = st.lists(st.integers(0, 9).map(float), min_size=3, max_size=3).filter(any)
STAGES = st.dictionaries(st.integers(1, STEPS), WEIGHTS, max_size=4).map(lambda found: dict(sorted(found.items())))


def staged(order: SampleOrder, stages: dict[int, list[float]]) -> SampleOrder:
    later = [tuple(weights[number] for weights in stages.values()) for number in range(len(order.components))]
    parts = zip(order.components, later, strict=True)
    components = tuple(replace(part, later_weights=weights) for part, weights in parts)
    return replace(order, components=components, stages=tuple(stages))


def reweighted(order: SampleOrder, weights: list[float]) -> tuple[Component, ...]:
    return tuple(replace(part, weight=weight) for part, weight in zip(order.components, weights, strict=True))


@some
@given(STAGES)
def test_a_stage_draws_what_a_fork_at_its_step_with_its_weights_would_draw(stages: dict[int, list[float]]) -> None:
    order, expected = MIXED, list[int]()
    for step, weights in stages.items():
        expected += draws_from(order, step - order.before.step)
        order = forked(order, step, components=reweighted(order, weights))
    expected += draws_from(order, STEPS - order.before.step)
    assert windows_until(staged(MIXED, stages), STEPS) == expected


@some
@given(STAGES, st.integers(0, STEPS))
def test_a_step_draws_the_same_windows_whoever_asks_first(stages: dict[int, list[float]], step: int) -> None:
    order = staged(MIXED, stages)
    whole = windows_until(order, STEPS + 1)
    assert order.windows_between(step, STEPS + 1).reshape(-1).tolist() == whole[step * order.global_batch :]
    assert order.windows_of(step).tolist() == whole[step * order.global_batch : (step + 1) * order.global_batch]


@some
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
