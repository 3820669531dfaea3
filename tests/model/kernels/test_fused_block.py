"""Fused kernels: a layer written out against the same layer under autocast, its GELU table, and whole runs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from cairn.model.architectures.gpt import Block, same_document_mask
from cairn.model.configuration.network import ModelConfig
from cairn.model.kernels.attention import rotations
from cairn.model.kernels.fused_block import _tables, activate, activate_backward
from tests.model.tiny_run import TinyRun

WIDTH, TIME = 48, 70


def layer(*, fused, **shape):
    torch.manual_seed(0)
    block = Block(ModelConfig(**{"n_layer": 1, "n_head": 3, "n_embd": WIDTH, "block_size": TIME, **shape}))
    for name, parameter in block.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("weight") and parameter.ndim == 1 else 0.0, std=0.1)
    block.fused = fused
    return block


def results(block, *, half=True, visible=None):
    """The output, then the gradients of input and parameters."""
    x = torch.randn(2, TIME, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        result = block(x, visible, turned=rotations(block.config, 0, TIME, x.device))
    result.backward(torch.randn(2, TIME, WIDTH, generator=torch.Generator().manual_seed(2)))
    return {"result": result.detach(), "x": x.grad, **{name: p.grad for name, p in block.named_parameters()}}


SHAPES = {
    "gpt2": {},
    "gpt2 without biases": {"bias": False},
    "gpt2 without gains": {"norm_gain": False},
    "qwen3": {"architecture": "qwen3"},
    "llama": {"architecture": "qwen3", "qk_norm": False},
    "shared keys, wide heads": {"architecture": "qwen3", "n_head": 4, "n_kv_head": 2, "head_size": 16},
    "squared ReLU without gains": {"architecture": "qwen3", "feed_forward": "relu2", "norm_gain": False},
    "learned positions, normed queries": {"norm": "rms", "qk_norm": True, "n_kv_head": 1},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_as_near_to_fp32_as_autocast_is(shape, masked) -> None:
    visible = same_document_mask(torch.arange(2 * TIME).view(2, TIME) % 11, 3) if masked else None
    exact = results(layer(fused=False, **shape), half=False, visible=visible)
    theirs = results(layer(fused=False, **shape), visible=visible)
    ours = results(layer(fused=True, **shape), visible=visible)
    assert ours.keys() == exact.keys()
    for name, whole in exact.items():
        if name == "attn.c_attn.bias":  # a third of it, the keys', is zero but for rounding
            whole, ours[name], theirs[name] = (found[-WIDTH:] for found in (whole, ours[name], theirs[name]))
        ours_off, theirs_off = ((found[name].float() - whole).norm() for found in (ours, theirs))
        assert ours[name].dtype == torch.float32, name
        assert ours_off < 1.5 * theirs_off + 1e-6, (name, ours_off / theirs_off)
        assert ours_off < 0.02 * whole.norm(), name


def test_in_fp32_it_is_the_stock_layer_bit_for_bit() -> None:
    stock, fused = (results(layer(fused=fused), half=False) for fused in (False, True))
    assert all(torch.equal(stock[name], fused[name]) for name in stock)


def test_the_gradient_with_dropout_is_that_of_the_function_it_drew() -> None:
    # Moving against the gradient by a little must lower the loss by what the gradient says.
    block, losses = layer(fused=True, dropout=0.3), []
    x = torch.randn(2, TIME, WIDTH, generator=torch.Generator().manual_seed(1))
    down = torch.randn(2, TIME, WIDTH, generator=torch.Generator().manual_seed(2))
    for step in (0.0, 1.0):
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (block(x, None) * down).mean()
        if step == 0.0:
            loss.backward()
            slope = sum(p.grad.square().sum() for p in block.parameters())
            with torch.no_grad():
                for p in block.parameters():
                    p -= 0.05 / slope.sqrt() * p.grad
        losses.append(loss.item())
    assert losses[0] - losses[1] == pytest.approx(0.05 * slope.sqrt().item(), rel=0.1)


def test_dropout_is_off_while_it_does_not_train() -> None:
    plain, dropping = results(layer(fused=True)), layer(fused=True, dropout=0.3)
    assert torch.equal(results(dropping.eval())["result"], plain["result"])


def test_the_same_generator_gives_the_same_bits() -> None:
    found = []
    for _ in range(2):
        block = layer(fused=True, dropout=0.3)
        torch.manual_seed(3)
        found.append(results(block))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_recomputing_it_changes_no_bit() -> None:
    plain, recomputed = (
        TinyRun(kernels="fused", precision="bf16", activation_checkpointing=recompute, model={"dropout": 0.1})
        for recompute in (False, True)
    )
    plain.train(4), recomputed.train(4)
    assert plain.bits() == recomputed.bits()


def test_the_first_layer_of_a_process_can_be_recomputed() -> None:
    _tables.cache_clear()
    TinyRun(kernels="fused", precision="bf16", activation_checkpointing=True).train(1)


def every_number():
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def test_each_number_has_the_very_gelu_that_torch_computes() -> None:
    x = every_number()
    torch.testing.assert_close(activate(x, "gelu"), F.gelu(x, approximate="tanh"), rtol=0.0, atol=0.0, equal_nan=True)


def test_each_number_has_the_very_slope_that_torch_computes() -> None:
    x = every_number()
    expected = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh")
    torch.testing.assert_close(
        activate_backward(torch.ones_like(x), x, "gelu"), expected, rtol=0.0, atol=0.0, equal_nan=True
    )


def test_a_gradient_is_scaled_by_the_slope_wherever_it_stands() -> None:
    x, gradient = torch.randn(2, 700, 701).to(torch.bfloat16)  # more than is looked up at a time
    expected = torch.ops.aten.gelu_backward(gradient, x, approximate="tanh")
    torch.testing.assert_close(activate_backward(gradient, x, "gelu"), expected, rtol=2**-7, atol=1e-30)


def test_autocast_changes_nothing() -> None:
    x = torch.linspace(-4.0, 4.0, 100).to(torch.bfloat16).view(4, 25)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(activate(x, "gelu"), F.gelu(x, approximate="tanh"))


IN_ANOTHER_PROCESS = """
import sys
import torch
from cairn.model.training.determinism import make_deterministic
from tests.model.tiny_run import TinyRun
make_deterministic(seed=1, threads=1)
run = TinyRun(kernels="fused", precision="bf16", model={"dropout": 0.1, "block_size": 70})
run.train(5)
torch.save(run.tensors(), sys.argv[1])
"""


def test_fused_kernels_say_the_loss_of_the_stock_ones_at_the_first_step() -> None:
    stock, fused = (TinyRun(kernels=kernels).train(1)[0] for kernels in ("stock", "fused"))
    assert fused.train_loss == pytest.approx(stock.train_loss, rel=1e-6)
    assert fused.grad_norm == pytest.approx(stock.grad_norm, rel=1e-5)


def test_fused_kernels_keep_attention_within_documents() -> None:
    def first(kernels):
        run = TinyRun(kernels=kernels, precision="bf16", mask_documents=True)
        run.state.model.boundary_id = 7
        return run.train(1)[0]

    assert first("fused").train_loss == pytest.approx(first("stock").train_loss, rel=1e-3)


@pytest.mark.slow  # quick witness: test_same_bits_on_any_number_of_processes.py, whose ranks are processes of their own
def test_a_fused_run_begun_in_one_process_and_continued_in_another_ends_in_the_bits_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / "state.pt")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    continued, whole = (
        TinyRun(kernels="fused", precision="bf16", model={"dropout": 0.1, "block_size": 70}) for _ in range(2)
    )
    continued.state.load(torch.load(tmp_path / "state.pt", weights_only=True))
    continued.train(12)
    whole.train(12)
    assert continued.bits() == whole.bits()


def test_a_probe_sees_the_network_in_fp32_whatever_kernels_train_it() -> None:
    run = TinyRun(kernels="fused", precision="bf16")
    tokens = torch.arange(16).view(2, 8)
    expected = TinyRun().state.model(tokens)
    assert torch.equal(run.state.model(tokens), expected)
