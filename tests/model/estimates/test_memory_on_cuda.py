"""The estimated memory of a trainer and of an evaluator beside what they really take of a GPU: `pytest -m gpu`.

Every process is fresh and alone on the device.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cairn.model.estimates.size_estimate import TrainingPlace, estimate_memory
from tests.device import device_under_test
from tests.programs.benchmarks.evaluator_memory import measure_evaluator
from tests.programs.benchmarks.trainer_memory import MemoryCase, measure

pytestmark = pytest.mark.gpu
WITHIN = 0.15
GPT2 = MemoryCase(
    layers=12,
    heads=12,
    width=768,
    block=1024,
    vocab_size=50257,
    micro_batch=8,
    global_batch=16,
    precision="bf16",
    kernels="fused",
)
CASES = {
    "fused": GPT2,
    "stock": replace(GPT2, kernels="stock"),
    "fp32": replace(GPT2, precision="fp32", kernels="stock", micro_batch=4, global_batch=8),
    "recomputed": replace(GPT2, recompute=True),
    "masked": replace(GPT2, masked=True),
    "dropout": replace(GPT2, dropout=0.1),
    "probed": replace(GPT2, probed=True, micro_batch=1, global_batch=1),
    "350M": replace(GPT2, layers=24, heads=16, width=1024),
}
Record = Callable[[str, object], None]


def here(case: MemoryCase) -> MemoryCase:
    """Return the case for the device under test, on a CPU at a size that shows no more than that it runs."""
    device = device_under_test().type
    if device == "cuda":
        return replace(case, device=device)
    return replace(case, device=device, layers=2, heads=2, width=64, block=64, vocab_size=512)


def require_near(estimate: int, taken: int, record: Record) -> None:
    """Fail where the estimate is not near; both are recorded. A CPU has no such number."""
    if taken:
        record("estimate_mb", estimate / 1e6)
        record("taken_mb", taken / 1e6)
        record("ratio", estimate / taken)
        assert abs(estimate / taken - 1) <= WITHIN, f"{estimate / 1e6:.0f} MB estimated, {taken / 1e6:.0f} MB taken"


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_takes_what_is_estimated(name: str, record_property: Record) -> None:
    case = here(CASES[name])
    require_near(case.estimate.total_bytes, measure(case).device_peak_bytes, record_property)


def test_an_evaluator_beside_it_takes_what_is_estimated(record_property: Record) -> None:
    case = here(GPT2)
    place = TrainingPlace(on_cuda=True, evaluates=True)
    sizes = {"micro_batch": case.micro_batch, "recompute": False}
    estimate = estimate_memory(case.model, case.training, case.vocab_size, **sizes, place=place)
    require_near(estimate.evaluator_bytes, measure_evaluator(case), record_property)
