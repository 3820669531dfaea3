"""The estimated memory of a training step on CUDA beside the peak of its live tensors, on a GPU of shapes alone.

What a GPU has besides, the context, kernels' own buffers and the allocator's holes, is measured by `make gpu-check`.
"""

import pytest

from tests.cuda import fake_cuda
from tests.cuda.traces import Trace, traced

pytestmark = [
    pytest.mark.slow,  # beside: tests/model/test_size_estimate.py
    pytest.mark.skipif(fake_cuda.missing() is not None, reason=f"no fake GPU: {fake_cuda.missing()}"),
]
WITHIN = 0.03
QWEN3 = {"architecture": "qwen3", "n_kv_head": 4}
SMALL = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256}
MEDIUM = {"n_layer": 24, "n_head": 16, "n_embd": 1024}
AGAIN, STOCK, MASKED = {"activation_checkpointing": True}, {"kernels": "stock"}, {"mask_documents": True}
FP32, FP16 = {"precision": "fp32"}, {"precision": "fp16", **STOCK}


def windows(count: int, micro_batch: int | None = None) -> dict[str, int]:
    return {"global_batch": count, "micro_batch": micro_batch or count}


CASES: dict[str, tuple[Trace, Trace]] = {
    "fused": ({}, {}),
    "fused, 32 windows": ({}, windows(32)),
    "fused, 1 window": ({}, windows(1)),
    "stock": ({}, STOCK),
    "fp32": ({}, {**FP32, **STOCK, **windows(4)}),
    "fp32, fused": ({}, {**FP32, **windows(4)}),
    "fp16": ({}, FP16),
    "recomputed": ({}, AGAIN),
    "recomputed, 32 windows, dropout": ({"dropout": 0.1}, {**AGAIN, **windows(32)}),
    "recomputed, stock": ({}, {**AGAIN, **STOCK}),
    "masked": ({}, MASKED),
    "dropout": ({"dropout": 0.1}, {}),
    "dropout, 32 windows": ({"dropout": 0.1}, windows(32)),
    "two micro-batches": ({}, windows(16, 8)),
    "four micro-batches": ({}, windows(16, 4)),
    "muon": ({}, {"optimizer": "muon"}),
    "momentum": ({}, {"optimizer": "momentum"}),
    "qwen3": (QWEN3, {}),
    "qwen3, stock": (QWEN3, STOCK),
    "qwen3, recomputed": (QWEN3, AGAIN),
    "small": (SMALL, windows(64)),
    "small, stock": (SMALL, {**STOCK, **windows(64)}),
    "350M": (MEDIUM, {}),
    "350M, recomputed": (MEDIUM, AGAIN),
}
PROCESSES = 4


@pytest.fixture(scope="module", params=range(PROCESSES))
def ratios(request: pytest.FixtureRequest) -> dict[str, float]:
    """Estimate by traced peak, of a part of the cases: a process of its own for each part."""
    names = list(CASES)[request.param :: PROCESSES]
    found = traced(*({"device": "cuda", "model": CASES[name][0], "training": CASES[name][1]} for name in names))
    return {name: one["estimate_bytes"] / one["peak_bytes"] for name, one in zip(names, found, strict=True)}


def test_a_step_takes_the_memory_that_is_estimated(ratios: dict[str, float]) -> None:
    print("\n" + "\n".join(f"{name:40} {ratio:.3f}" for name, ratio in ratios.items()))
    assert {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > WITHIN} == {}
