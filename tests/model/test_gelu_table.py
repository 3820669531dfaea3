"""GELU looked up against GELU computed, for every number of 16 bits there is."""

import torch
import torch.nn.functional as F

from cairn.model.kernels.fused_block import activate, activate_backward


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
