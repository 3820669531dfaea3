"""One step: accumulation, clipping, refusal of non-finite numbers."""

import math

import pytest
import torch

from cairn.model.errors import NonFiniteLoss, TokenOutOfRange
from cairn.model.training.training_step import take_step
from tests.model.tiny_run import TinyRun


def step(run, **changes):
    return take_step(run.state, run.inputs(**changes))


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 5])
def test_accumulating_micro_batches_equals_the_full_batch(micro_batch) -> None:
    whole, parts = TinyRun(), TinyRun()
    expected, got = step(whole), step(parts, micro_batch=micro_batch)
    assert got.loss == pytest.approx(expected.loss, rel=1e-6)
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for a, b in zip(whole.state.model.parameters(), parts.state.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_the_recorded_norm_is_the_one_before_clipping() -> None:
    free, clipped = step(TinyRun(grad_clip=0.0)), step(TinyRun(grad_clip=1e-3))
    assert clipped.grad_norm == free.grad_norm > 1e-3


def test_clipping_changes_the_moments() -> None:
    free, clipped = TinyRun(grad_clip=0.0), TinyRun(grad_clip=1e-3)
    step(free)
    step(clipped)
    sizes = [max(s["exp_avg"].abs().max() for s in run.state.optimizers[0].state.values()) for run in (free, clipped)]
    assert sizes[1] < sizes[0] / 10


def test_a_non_finite_loss_is_raised_before_any_weight_changes() -> None:
    run = TinyRun(model={"dropout": 0.1})
    run.train(2)
    with torch.no_grad():
        run.state.model.ln_f.weight[0] = float("nan")
    before = run.bits()
    with pytest.raises(NonFiniteLoss, match="step 3: loss is nan") as caught:
        step(run, micro_batch=2)
    assert caught.value.step == 3
    assert caught.value.windows == tuple(run.order.windows_of(2)[:2].tolist())
    assert run.bits() == before


def test_a_non_finite_gradient_is_raised_before_any_weight_changes() -> None:
    run = TinyRun()
    run.state.model.wte.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = run.bits()
    with pytest.raises(NonFiniteLoss, match="grad_norm"):
        step(run)
    assert run.bits() == before


def test_fp16_skips_an_update_with_a_non_finite_gradient_and_lowers_its_scale() -> None:
    run = TinyRun(precision="fp16")
    step(run)
    weights, scale = [p.clone() for p in run.state.model.parameters()], run.state.scaler.get_scale()
    handle = run.state.model.wte.weight.register_hook(lambda gradient: gradient * float("inf"))
    result = step(run)
    handle.remove()
    assert not math.isfinite(result.grad_norm) and run.state.scaler.get_scale() < scale
    assert all(torch.equal(a, b) for a, b in zip(weights, run.state.model.parameters(), strict=True))


def test_a_bad_token_leaves_the_state_as_it_was() -> None:
    run = TinyRun()
    run.train(1)
    run.windows.vocab_size = 3
    before = run.bits()
    with pytest.raises(TokenOutOfRange):
        step(run)
    assert run.bits() == before
