"""Attention by blocks of queries against PyTorch's own, forward and backward, and its dropout by bits."""

import pytest
import torch
import torch.nn.functional as F

from cairn.model.architectures.gpt import same_document_mask
from cairn.model.kernels.attention import apply_keep_mask, attend, attend_backward, draw_keep_mask

HEADS, DEPTH = 3, 16


def example(time, dtype):
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(2, time, 3 * HEADS * DEPTH, generator=generator)
    gradient = torch.linspace(-1.0, 1.0, 2 * time * HEADS * DEPTH).view(2, time, HEADS * DEPTH)
    return joint.to(dtype), gradient.to(dtype)


def by_blocks(time, dtype, visible=None):
    joint, gradient = example(time, dtype)
    mixed, saved = attend(joint, HEADS, visible, 0.0)
    return mixed, attend_backward(gradient, saved, 0.0)


def stock(time, dtype, visible=None):
    joint, gradient = example(time, dtype)
    joint.requires_grad_()
    query, key, value = (part.view(2, time, HEADS, DEPTH).transpose(1, 2) for part in joint.split(HEADS * DEPTH, 2))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, is_causal=visible is None)
    mixed = mixed.transpose(1, 2).reshape(2, time, -1)
    mixed.backward(gradient)
    return mixed.detach(), joint.grad


@pytest.mark.parametrize("time", [1, 7, 64, 65, 130, 300])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_attend_as_the_whole_does(time, masked) -> None:
    tokens = torch.arange(2 * time).view(2, time) % 11
    visible = same_document_mask(tokens, 3) if masked else None
    results = zip(by_blocks(time, torch.float32, visible), stock(time, torch.float32, visible), strict=True)
    for got, expected in results:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_half_precision_is_as_near_to_fp32_as_the_stock_kernel_is() -> None:
    exact = stock(200, torch.float32)
    for whole, ours, theirs in zip(exact, by_blocks(200, torch.bfloat16), stock(200, torch.bfloat16), strict=True):
        ours_off, theirs_off = ((found.float() - whole).abs().mean() for found in (ours, theirs))
        assert ours_off < 1.5 * theirs_off + 1e-6


def test_the_gradient_with_dropout_is_that_of_the_function_it_drew() -> None:
    joint, gradient = example(70, torch.bfloat16)
    torch.manual_seed(4)
    mixed, saved = attend(joint, HEADS, None, 0.4)
    of_joint = attend_backward(gradient, saved, 0.4)
    leaf = joint.float().requires_grad_()
    query, key, value = (part.view(2, 70, HEADS, DEPTH).transpose(1, 2) for part in leaf.split(HEADS * DEPTH, 2))
    weights = (query @ key.mT / DEPTH**0.5).masked_fill(torch.ones(70, 70).triu(1).bool(), -torch.inf).softmax(-1)
    survives = torch.zeros(2 * HEADS, 70, 70)
    for begin, keep_masks in ((0, saved.keep_masks[0]), (64, saved.keep_masks[1])):
        survives[:, begin : begin + keep_masks.shape[1], : keep_masks.shape[2]] = (keep_masks != 0).float()
    expected = ((weights * survives.view_as(weights) / 0.6) @ value).transpose(1, 2).reshape(2, 70, -1)
    expected.backward(gradient.float())
    torch.testing.assert_close(mixed.float(), expected.detach(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(of_joint.float(), leaf.grad, rtol=0.05, atol=0.05)


def test_dropout_keeps_the_mean_and_drops_something() -> None:
    joint, _ = example(40, torch.bfloat16)
    plain, _ = attend(joint, HEADS, None, 0.0)
    torch.manual_seed(0)
    several = torch.stack([attend(joint, HEADS, None, 0.3)[0].float() for _ in range(300)])
    assert not torch.equal(several[0], plain.float())
    torch.testing.assert_close(several.mean(dim=0), plain.float(), rtol=0.0, atol=0.3)


@pytest.mark.parametrize("dropout", [0.1, 0.2, 0.5, 0.9])
def test_the_share_that_survives_is_the_chance_to(dropout) -> None:
    torch.manual_seed(1)
    survivors = draw_keep_mask((1000, 999), dropout)
    assert set(survivors.unique().tolist()) == {0, -1}
    assert (survivors != 0).float().mean().item() == pytest.approx(1.0 - dropout, abs=0.003)


def test_every_row_and_every_column_is_drawn_by_itself() -> None:
    torch.manual_seed(2)
    alive = (draw_keep_mask((400, 402), 0.5) != 0).float()
    assert (alive.T.corrcoef() - torch.eye(402)).abs().max() < 0.3
    assert (alive.corrcoef() - torch.eye(400)).abs().max() < 0.3


def test_what_survives_is_scaled_to_keep_the_sum() -> None:
    torch.manual_seed(3)
    ones = torch.ones(1000, 100, dtype=torch.bfloat16)
    left = apply_keep_mask(ones, draw_keep_mask(ones.shape, 0.2), 0.2)
    assert set(left.unique().tolist()) == {0.0, 1.25}
    assert torch.equal(ones, torch.ones_like(ones))


def test_the_process_generator_decides() -> None:
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(draw_keep_mask((7, 13), 0.5))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
