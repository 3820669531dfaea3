"""The estimate of a trainer's memory against the peak of real trainers' parts, each in a process of its own."""

import pytest

from tests.benchmarks.trainer_memory import CASES, MemoryCase, measure

WITHIN = 0.15


def test_a_small_trainer_takes_what_is_estimated() -> None:
    case = CASES["small fp32 fused 32"]
    assert case.estimate.total_bytes == pytest.approx(measure(case).peak_bytes, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_three_sizes_in_every_mode_take_what_is_estimated(case: MemoryCase) -> None:
    assert case.estimate.total_bytes == pytest.approx(measure(case).peak_bytes, rel=WITHIN)
