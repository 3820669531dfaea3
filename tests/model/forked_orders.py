"""Orders of a run and of its forks."""

from dataclasses import replace

from cairn.model.configuration.data import TrainedBefore
from cairn.model.data.sample_order import Component, SampleOrder

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
