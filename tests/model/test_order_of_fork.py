"""Which windows a fork draws: those that its parent had not drawn, with another batch, other weights and other data."""

from dataclasses import replace

import numpy as np
import pytest

from cairn.model.configuration.data import TrainedBefore
from cairn.model.data.sample_order import SampleOrder
from cairn.model.errors import InvalidInput
from tests.model.forked_orders import MIXED, PARENT, STEP, draws_from, forked, windows_until


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
    parts = zip(MIXED.components, weights, strict=True)
    components = tuple(replace(part, weight=weight) for part, weight in parts)
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
