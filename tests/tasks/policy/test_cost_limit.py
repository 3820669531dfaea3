"""When a run's next segment is too dear: a table of limits, prices and what was spent."""

import pytest

from cairn.tasks.configuration.settings import CostConfig
from cairn.tasks.policy.budgets import Spent, limit_problem, read_spent
from tests.fabricated_run import fabricate
from tests.memory_store import MemoryStore

HOURS = "cost.limit = 2 device hours: 1.9 device hours spent, and the next 100 steps would take 0.19 device hours"


@pytest.mark.parametrize(
    ("cost", "hours", "steps", "next_steps", "problem"),
    [
        ({}, 1e6, 1, 1, ""),
        ({"limit": 2.0}, 0.0, 0, 100, ""),
        ({"limit": 2.0}, 1.9, 0, 100, ""),
        ({"limit": 2.0}, 1.5, 100, 33, ""),
        ({"limit": 2.0}, 1.0, 100, 100, ""),
        ({"limit": 2.0}, 1.9, 1000, 100, HOURS),
        ({"limit": 2.0}, 2.0, 0, 1, "2 device hours spent"),
        ({"limit": 1e-9}, 0.0, 0, 1, ""),
        ({"limit": 5.0, "gpu_hour_price": 2.5}, 1.8, 900, 100, ""),
        ({"limit": 5.0, "gpu_hour_price": 2.5, "currency": "EUR"}, 1.9, 950, 100, "limit = 5.00 EUR: 4.75 EUR spent"),
        ({"limit": 5.0, "gpu_hour_price": 0.0}, 4.9, 49, 1, ""),
        ({"limit": 5.0, "gpu_hour_price": 0.0}, 5.1, 49, 1, "5.1 device hours spent"),
    ],
)  # fmt: skip
def test_a_segment_is_trained_unless_the_run_would_pass_its_limit(
    cost: dict[str, object], hours: float, steps: int, next_steps: int, problem: str
) -> None:
    found = limit_problem(
        CostConfig.model_validate(cost), Spent(device_seconds=3600 * hours, steps=steps), next_steps=next_steps
    )
    assert problem in found and bool(problem) == bool(found)


@pytest.mark.parametrize("limit", [0, -1, float("inf"), float("nan"), "much"])
def test_a_limit_is_a_positive_number(limit: object) -> None:
    with pytest.raises(ValueError, match="limit"):
        CostConfig.model_validate({"limit": limit})


def test_what_was_spent_is_added_up() -> None:
    both = Spent(device_seconds=3.0, steps=2) + Spent(device_seconds=1.0, steps=2)
    assert (both, both.seconds_per_step) == (Spent(device_seconds=4.0, steps=4), 1.0)


def test_what_a_run_spent_are_the_steps_and_seconds_of_its_ended_attempts() -> None:
    run = fabricate(MemoryStore(), "bard")
    run.start()
    run.commit(10)
    run.end("lost", action="retry", last_step=12, gpu_seconds=30.0)
    run.start()  # from step 10 on
    run.end("lost", action="retry", last_step=15, gpu_seconds=20.0)
    run.start()
    assert read_spent(run.log.state) == Spent(device_seconds=50.0, steps=12 + 5)
