"""The estimate of a trainer's memory against the peak of real trainers' parts, each in a process of its own."""

import pytest

from tests.programs.benchmarks.trainer_memory import CASES, MemoryCase, measure

pytestmark = [pytest.mark.linux, pytest.mark.xdist_group("measured-memory")]  # the least trainer is measured once
WITHIN = 0.15
LEAST = MemoryCase(layers=1, heads=1, width=8, block=8, vocab_size=64, micro_batch=1, global_batch=1)


@pytest.fixture(scope="module")
def runtime_bytes() -> int:
    """Bytes of interpreter, torch and its libraries here, which depend on the build of torch and on the page size."""
    return measure(LEAST, threads=1).peak_bytes


def estimated_bytes(case: MemoryCase, runtime_bytes: int) -> int:
    return case.estimate.total_bytes - case.estimate.runtime_bytes + runtime_bytes


@pytest.mark.slow  # quick witness of the sums: tests/model/estimates/test_size_estimate.py
def test_a_small_trainer_takes_what_is_estimated(runtime_bytes: int) -> None:
    case = CASES["small fp32 fused 32"]
    assert estimated_bytes(case, runtime_bytes) == pytest.approx(measure(case, threads=1).peak_bytes, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_three_sizes_in_every_mode_take_what_is_estimated(case: MemoryCase, runtime_bytes: int) -> None:
    assert estimated_bytes(case, runtime_bytes) == pytest.approx(measure(case, threads=1).peak_bytes, rel=WITHIN)
