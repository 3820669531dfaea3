"""The training step on a GPU of shapes alone: which kernels it calls, that its host waits for nothing, what it leaves.

Numbers, speed and PyTorch's own choice of kernels need a GPU: `make gpu-check`.
"""

from typing import Any

import pytest

from tests.cuda import fake_cuda
from tests.cuda.traces import Trace, traced

WAITING = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_pin_memory", "masked_select"}
"""Operations for whose result the host waits; all but the copies to it."""
FLASH = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
BY_BOUNDS = ("_flash_attention_forward", "_flash_attention_backward")
LAYERS = 3

pytestmark = [
    pytest.mark.xdist_group("fake-cuda"),  # a step is traced once for all its tests
    pytest.mark.skipif(fake_cuda.missing() is not None, reason=f"no fake GPU: {fake_cuda.missing()}"),
]


def require_no_waiting(found: Trace) -> None:
    """Fail where the host would wait for the device."""
    assert not WAITING & found["operations"].keys() and found["to_host"] == []


def calls(found: Trace, names: tuple[str, ...]) -> list[int]:
    """Return how often these operations were called."""
    return [found["operations"].get(name, 0) for name in names]


def shallow(**case: Any) -> Trace:
    """Return a case of few layers: each layer is computed as the one before."""
    return {**case, "model": {"n_layer": LAYERS, **case.get("model", {})}}


@pytest.fixture(scope="module")
def gpt2() -> tuple[Trace, Trace]:
    """A step of a shallow GPT-2 in bf16, with fused head and deferred metrics; and the state that it has on a CPU."""
    on_cuda, on_cpu = traced(shallow(device="cuda"), shallow(device="cpu", do="nothing"))
    return on_cuda, on_cpu


def test_every_layer_attends_by_flash_attention_forward_and_backward(gpt2: tuple[Trace, Trace]) -> None:
    assert calls(gpt2[0], FLASH) == [LAYERS, LAYERS] and calls(gpt2[0], ("bmm", "_softmax", "_safe_softmax")) == [0] * 3


def test_the_update_is_adamw_s_fused_kernel_once_a_group(gpt2: tuple[Trace, Trace]) -> None:
    assert calls(gpt2[0], ("_fused_adamw_", "addcdiv_", "_foreach_addcdiv_")) == [2, 0, 0]


def test_the_host_waits_for_nothing_in_a_launched_step(gpt2: tuple[Trace, Trace]) -> None:
    require_no_waiting(gpt2[0])
    assert gpt2[0]["made"] == {"metrics": ["cuda", [2], "torch.float32"], "weights_sum": ["cuda", [], "torch.int64"]}


def test_weights_and_moments_are_on_the_device_and_as_on_a_cpu(gpt2: tuple[Trace, Trace]) -> None:
    on_cuda, on_cpu = (found["tensors"] for found in gpt2)
    assert on_cuda.keys() == on_cpu.keys() and len(on_cuda) > 3 * 12 * LAYERS
    assert {name: ["cpu", *rest] for name, (_, *rest) in on_cuda.items()} == on_cpu
    assert {device for device, *_ in on_cuda.values()} == {"cuda"}


def test_every_weight_has_a_gradient_of_its_shape_in_fp32_on_the_device(gpt2: tuple[Trace, Trace]) -> None:
    weights = {name.removeprefix("model."): of for name, of in gpt2[0]["tensors"].items() if name.startswith("model.")}
    assert gpt2[0]["gradients"] == weights and {dtype for *_, dtype in weights.values()} == {"torch.float32"}


QWEN3 = {"architecture": "qwen3", "n_kv_head": 4}
MODULE = {"module": "nano.py:build"}
SLOW = {
    "qwen3": ({"model": QWEN3}, FLASH, [LAYERS, LAYERS], {}),
    "recomputed activations": ({"training": {"activation_checkpointing": True}}, FLASH, [2 * LAYERS, LAYERS], {}),
    "muon": ({"model": QWEN3, "training": {"optimizer": "muon"}}, FLASH, [LAYERS, LAYERS], {}),
    "within documents": ({"training": {"mask_documents": True}}, BY_BOUNDS, [LAYERS, LAYERS], {}),
    "dropout": ({"model": {"dropout": 0.1}}, FLASH, [LAYERS, LAYERS], {}),
    "two micro-batches": ({"training": {"micro_batch": 4}}, FLASH, [2 * LAYERS, 2 * LAYERS], {}),
    "momentum": ({"training": {"optimizer": "momentum"}}, ("_fused_sgd_",), [2], {}),
    "stock": ({"training": {"kernels": "stock"}}, FLASH, [LAYERS, LAYERS], {}),
    "without Triton": ({}, FLASH, [LAYERS, LAYERS], {"NO_TRITON": "1"}),
    "adapters": ({"model": QWEN3, "training": {"lora": {}}}, (*FLASH, "_fused_adamw_"), [LAYERS, LAYERS, 1], {}),
    "fp32": ({"training": {"precision": "fp32", "kernels": "stock"}}, FLASH, [0, 0], {}),
    "fp16": ({"training": {"precision": "fp16", "kernels": "stock"}}, FLASH, [LAYERS, LAYERS], {}),
    "a module": ({"model": MODULE, "training": {"kernels": "stock"}}, FLASH, [LAYERS, LAYERS], {}),
}
"""Cases, the operations that are counted there, how often they come, and the process's variables."""


@pytest.mark.slow  # beside: test_every_layer_attends_by_flash_attention_forward_and_backward
@pytest.mark.parametrize("name", SLOW)
def test_every_mode_calls_its_kernels_and_waits_for_nothing(name: str) -> None:
    case, names, expected, variables = SLOW[name]
    (found,) = traced(shallow(device="cuda", **case), **variables)
    assert calls(found, names) == expected
    require_no_waiting(found)
    weights = {name.removeprefix("model."): of for name, of in found["tensors"].items() if name.startswith("model.")}
    assert found["gradients"] == weights


@pytest.mark.slow  # beside: test_the_host_waits_for_nothing_in_a_launched_step
def test_the_scaler_of_fp16_leaves_its_verdict_on_the_device() -> None:
    (found,) = traced(shallow(device="cuda", training={"precision": "fp16", "kernels": "stock"}))
    names = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "_fused_adamw_")
    assert calls(found, names) == [1, 1, 2]


@pytest.mark.slow  # beside: test_the_host_waits_for_nothing_in_a_launched_step
def test_a_held_out_loss_comes_to_the_host_once_for_some_thousand_tokens() -> None:
    (found,) = traced(shallow(device="cuda", do="held out"))
    assert found["made"] == {"windows": 32} and found["to_host"] == ["_to_copy"] * 8
    assert calls(found, FLASH) == [0, 0]  # in fp32


@pytest.mark.slow  # beside: test_the_host_waits_for_nothing_in_a_launched_step
def test_a_sample_s_scores_come_to_the_host_once_a_token() -> None:
    (found,) = traced(shallow(device="cuda", do="sample"))
    assert found["made"] == {"tokens": [5, 5, 5]} and found["to_host"] == ["_to_copy"] * 3


@pytest.mark.slow  # beside: test_weights_and_moments_are_on_the_device_and_as_on_a_cpu
def test_a_checkpoint_s_copies_are_on_the_host_and_as_the_state() -> None:
    (found,) = traced(shallow(device="cuda", do="copy"))
    copies = {name: of for name, of in found["made"]["copies"].items() if name in found["tensors"]}
    assert copies == {name: ["cpu", *rest] for name, (_, *rest) in found["tensors"].items()}
