"""The loss on answers: targets outside of them count nothing, in every kernel, batch and evaluation."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cairn.model.data.token_windows import TokenWindows
from cairn.model.inference.prediction import window_losses
from cairn.model.kernels.head_loss import head_loss, token_loss
from tests.model.tiny_run import VOCAB, TinyRun

WIDTH = 12
HEADS = {
    "whole logits": lambda h, w, t, z: token_loss(F.linear(h, w), t, z),
    "chunked": lambda h, w, t, z: head_loss(h, w, t, z, chunk_bytes=7 * 4 * VOCAB),
    "padded": lambda h, w, t, z: head_loss(h, w, t, z, is_padded=True, chunk_bytes=1),
}


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 70, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCAB, (3, 70), generator=generator)
    return hidden, weight, targets, torch.rand(3, 70, generator=generator) < 0.3


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("head", HEADS)
def test_loss_and_gradient_are_those_of_the_counted_targets_alone(head: str, z_loss: float) -> None:
    hidden, weight, targets, counted = example()
    loss = HEADS[head](hidden, weight, torch.where(counted, targets, ~targets), z_loss)
    loss.backward()
    alone, table, _, _ = example()
    logits = F.linear(alone[counted], table)
    expected = F.cross_entropy(logits, targets[counted], reduction="sum") / targets.numel()
    (expected + z_loss * logits.logsumexp(dim=-1).square().sum() / targets.numel()).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad, alone.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight.grad, table.grad, rtol=1e-4, atol=1e-6)
    assert not hidden.grad[~counted].any(), "exactly nothing"


@pytest.mark.parametrize("head", HEADS)
def test_nothing_that_counts_is_a_loss_of_0_and_no_gradient(head: str) -> None:
    hidden, weight, targets, _ = example()
    loss = HEADS[head](hidden, weight, ~targets, 0.01)
    loss.backward()
    assert float(loss.detach()) == 0.0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("kernels", ["stock", "fused"])
@pytest.mark.parametrize("micro_batch", [1, 4, 6])
def test_a_step_s_loss_is_the_mean_over_the_answers_of_the_whole_batch(micro_batch: int, kernels: str) -> None:
    run = TinyRun(has_answers=True, micro_batch=micro_batch, kernels=kernels)
    raw = torch.from_numpy(run.windows.gather(run.order.windows_of(0)))
    ids = torch.where(raw < 0, ~raw, raw)
    logits = run.state.model(ids[:, :-1])
    counted = raw[:, 1:] >= 0
    shares = counted.float().mean(dim=1)
    assert 0.0 in shares and len(shares.unique()) > 2, "windows of all kinds"
    expected = F.cross_entropy(logits[counted], ids[:, 1:][counted])
    (step,) = run.train(1)
    assert step.train_loss == pytest.approx(float(expected.detach()), rel=1e-5)


def test_a_step_without_any_answer_changes_nothing_but_by_decay_and_momentum() -> None:
    run = TinyRun(has_answers=True)
    (row,) = (run.windows._shards[0],)
    windows = TokenWindows([row], run.windows.block_size, VOCAB, [np.zeros(len(row), dtype=np.bool_)])
    before = {name: tensor.clone() for name, tensor in run.tensors().items() if name.endswith("wte.weight")}
    run.order = type(run.order)(window_count=windows.window_count, seed=3, global_batch=6)
    (step,) = run.train(1, windows=windows, order=run.order)
    assert step.train_loss == 0.0 and math.isfinite(step.grad_norm)
    for name, tensor in before.items():
        torch.testing.assert_close(run.tensors()[name], tensor, rtol=1e-3, atol=1e-6)


def test_answers_everywhere_are_the_bits_of_a_run_without_them() -> None:
    whole, marked = TinyRun(), TinyRun()
    shards = marked.windows._shards
    everything = [np.ones(len(shard), dtype=np.bool_) for shard in shards]
    marked.windows = TokenWindows(shards, marked.windows.block_size, VOCAB, everything)
    whole.train(3)
    marked.train(3)
    assert whole.bits() == marked.bits()


def test_tokens_outside_of_answers_are_read_but_not_learned() -> None:
    run = TinyRun(has_answers=True)
    gathered = run.windows.gather(np.arange(run.windows.window_count))
    plain = TinyRun().windows.gather(np.arange(run.windows.window_count))
    assert np.array_equal(np.where(gathered < 0, ~gathered, gathered), plain), "every id is there"
    begins = np.arange(len(gathered))[:, None] * run.windows.block_size + np.arange(gathered.shape[1])
    assert np.array_equal(gathered >= 0, run.answers[begins])


def test_the_held_out_loss_is_the_mean_over_the_tokens_of_answers() -> None:
    run = TinyRun(has_answers=True)
    model, windows = run.state.model, run.windows
    losses = window_losses(model, windows, count=20)
    raw = torch.from_numpy(windows.gather(np.arange(20, dtype=np.int64) * windows.window_count // 20))
    ids, counted = torch.where(raw < 0, ~raw, raw), raw[:, 1:] >= 0
    with torch.no_grad():
        expected = F.cross_entropy(model(ids[:, :-1])[counted], ids[:, 1:][counted])
    assert math.fsum(losses) / len(losses) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert 0.0 in losses, "a window without an answer"


def test_held_out_text_without_any_answer_has_no_loss_and_no_nan() -> None:
    run = TinyRun(has_answers=True)
    shard = run.windows._shards[0]
    windows = TokenWindows([shard], run.windows.block_size, VOCAB, [np.zeros(len(shard), dtype=np.bool_)])
    assert set(window_losses(run.state.model, windows, count=4)) == {0.0}
