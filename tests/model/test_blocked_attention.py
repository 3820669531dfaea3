"""Attention by blocks of queries against PyTorch's own, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from model.blocked_attention import blocked_attention
from model.gpt import same_document


def parts(time, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(2, time, 3 * 3 * 16, generator=generator).to(dtype).requires_grad_()
    return fused, [part.view(2, time, 3, 16).transpose(1, 2) for part in fused.split(48, dim=2)]


def attended(time, dtype, attend, visible=None):
    fused, (query, key, value) = parts(time, dtype)
    mixed = attend(query, key, value, visible)
    mixed.backward(torch.linspace(-1.0, 1.0, mixed.numel()).view_as(mixed).to(dtype))
    return mixed.detach(), fused.grad


def stock(query, key, value, visible):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, is_causal=visible is None)


def by_blocks(query, key, value, visible):
    return blocked_attention(query, key, value, visible, 0.0)


@pytest.mark.parametrize("time", [1, 7, 64, 65, 130, 300])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_attend_as_the_whole_does(time, masked):
    tokens = torch.arange(2 * time).view(2, time) % 11
    visible = same_document(tokens, 3) if masked else None
    for got, expected in zip(
        attended(time, torch.float32, by_blocks, visible),
        attended(time, torch.float32, stock, visible),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_half_precision_is_as_near_to_fp32_as_the_stock_kernel_is():
    exact = attended(200, torch.float32, stock)
    for whole, ours, theirs in zip(
        exact, attended(200, torch.bfloat16, by_blocks), attended(200, torch.bfloat16, stock), strict=True
    ):
        ours_off, theirs_off = ((found.float() - whole).abs().mean() for found in (ours, theirs))
        assert ours_off < 1.5 * theirs_off + 1e-6


def test_the_gradient_with_dropout_is_that_of_the_function_it_drew():
    _, tensors = parts(70, torch.float64)
    leaves = [tensor.detach()[:1, :1, :, :4].clone().requires_grad_() for tensor in tensors]

    def drawn(query, key, value):
        torch.manual_seed(4)
        return blocked_attention(query, key, value, None, 0.4)

    assert torch.autograd.gradcheck(drawn, leaves, fast_mode=True)


def test_dropout_keeps_the_mean_and_drops_something():
    _, (query, key, value) = parts(40, torch.float32)
    plain = by_blocks(query, key, value, None)
    torch.manual_seed(0)
    several = torch.stack([blocked_attention(query, key, value, None, 0.3) for _ in range(300)])
    assert not torch.equal(several[0], plain)
    torch.testing.assert_close(several.mean(dim=0), plain, rtol=0.0, atol=0.3)
