"""The estimated memory and exchanges of a step on CUDA beside those of its tensors, on a GPU of shapes alone.

What a GPU has besides, the context, kernels' own buffers and the allocator's holes, is measured by `make gpu-check`.
"""

import pytest

from cairn.model.estimates.size_estimate import TRACED_ERROR
from tests.cuda import fake_cuda
from tests.cuda.traces import Trace, traced

pytestmark = [
    pytest.mark.slow,  # beside: tests/model/estimates/test_size_estimate.py
    pytest.mark.skipif(fake_cuda.missing() is not None, reason=f"no fake GPU: {fake_cuda.missing()}"),
]
QWEN3 = {"architecture": "qwen3", "n_kv_head": 4}
SMALL = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256}
MEDIUM = {"n_layer": 24, "n_head": 16, "n_embd": 1024}
AGAIN, STOCK, MASKED = {"activation_checkpointing": True}, {"kernels": "stock"}, {"mask_documents": True}
FP32, FP16 = {"precision": "fp32"}, {"precision": "fp16", **STOCK}


def windows(count: int, micro_batch: int | None = None) -> dict[str, int]:
    return {"global_batch": count, "micro_batch": micro_batch or count}


WIDE = {"n_head": 16, "n_embd": 2048}
SEVEN_BILLIONS = {
    "architecture": "qwen3",
    **{"n_layer": 32, "n_head": 32, "n_embd": 4096, "n_inner": 11008, "block_size": 4096},
}
SHARDED, UNPROBED = {"parallel": "fsdp"}, {"probe_every_steps": 0}
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
    "adapters": (QWEN3, {"lora": {}}),
    "adapters, recomputed": ({}, {**AGAIN, "lora": {"rank": 32, "targets": ["c_attn"]}}),
    "adapters, two micro-batches": ({}, {"lora": {}, **STOCK, **windows(16, 8)}),
    "350M": (MEDIUM, {}),
    "350M, recomputed": (MEDIUM, AGAIN),
}
RANKS: dict[str, tuple[int, Trace, Trace]] = {
    "8 replicated": (8, {}, windows(64, 8)),
    "8 replicated, 1 window": (8, {}, windows(8, 1)),
    "3 replicated, qwen3, fp32": (3, QWEN3, {**FP32, **windows(3, 1)}),
    "2 replicated, two micro-batches": (2, {}, {**STOCK, **windows(4, 1)}),
    "8 replicated, adapters": (8, QWEN3, {"lora": {}, **windows(64, 8)}),
    "8 sharded": (8, {}, {**SHARDED, **windows(64, 8)}),
    "8 sharded, two micro-batches": (8, {}, {**SHARDED, **windows(64, 4)}),
    "64 sharded, 1 window": (64, {}, {**SHARDED, **windows(64, 1)}),
    "8 sharded, 350M": (8, MEDIUM, {**SHARDED, **windows(8, 1)}),
    "8 sharded, wide, two micro-batches": (8, {"n_layer": 12, **WIDE}, {**SHARDED, **windows(16, 1)}),
    "8 sharded, wide, recomputed": (8, {"n_layer": 12, **WIDE}, {**SHARDED, **AGAIN, **windows(8, 1)}),
    "8 sharded, wide, stock": (8, {"n_layer": 12, **WIDE}, {**SHARDED, **STOCK, **windows(8, 1)}),
    "8 sharded, wide, fp16": (8, {"n_layer": 6, **WIDE}, {**SHARDED, **FP16, **windows(8, 1)}),
    "8 sharded, wide, fp32": (8, {"n_layer": 4, **WIDE}, {**SHARDED, **FP32, **STOCK, **windows(8, 1)}),
    "4 sharded, masked, dropout": (4, {"dropout": 0.1}, {**SHARDED, **MASKED, **windows(32, 8)}),
    "2 sharded, qwen3, recomputed": (2, QWEN3, {**SHARDED, **AGAIN, **windows(16, 8)}),
    "64 sharded, 7B": (64, SEVEN_BILLIONS, {**SHARDED, **AGAIN, **UNPROBED, **windows(64, 1)}),
}
"""Runs of several processes, all but the first of which PyTorch's process group `fake` stands for."""
EVERY = {name: {"model": model, "training": training} for name, (model, training) in CASES.items()}
EVERY |= {
    name: {"processes": processes, "model": model, "training": training}
    for name, (processes, model, training) in RANKS.items()
}
PROCESSES = 4


@pytest.fixture(scope="module", params=range(PROCESSES))
def traces(request: pytest.FixtureRequest) -> dict[str, Trace]:
    """A part of the cases: a process of its own for each part."""
    names = list(EVERY)[request.param :: PROCESSES]
    return dict(zip(names, traced(*({"device": "cuda", **EVERY[name]} for name in names)), strict=True))


def test_a_step_takes_the_memory_that_is_estimated(traces: dict[str, Trace]) -> None:
    ratios = {name: found["estimate_bytes"] / found["peak_bytes"] for name, found in traces.items()}
    print("\n" + "\n".join(f"{name:40} {ratio:.3f}" for name, ratio in ratios.items()))
    assert {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > TRACED_ERROR} == {}


def test_several_processes_exchange_what_is_planned(traces: dict[str, Trace]) -> None:
    assert {name: found["exchanged"] for name, found in traces.items()} == {
        name: found["planned"] for name, found in traces.items()
    }


def test_the_host_of_several_processes_waits_for_nothing(traces: dict[str, Trace]) -> None:
    assert {name: found["to_host"] for name, found in traces.items() if found["to_host"]} == {}
