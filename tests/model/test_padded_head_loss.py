"""The head for matrix units: the loss of whole logits, however padded and cut; the same when compiled."""

import pytest
import torch
import torch.nn.functional as F

from model.kernels.padded_head_loss import MULTIPLE, chunk_rows, judge_logits, padded_head_loss, padded_vocabulary
from model.kernels.token_loss import token_loss

VOCAB, WIDTH, WINDOWS, TIME = 37, 12, 3, 130


def example():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(WINDOWS, TIME, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (WINDOWS, TIME), generator=generator)


def whole(hidden, weight, targets):
    return token_loss(F.linear(hidden, weight), targets)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * MULTIPLE * 256, 2**30], ids=["one tile", "two tiles", "all at once"])
def test_loss_and_gradients_are_those_of_whole_logits(chunk_bytes):
    results = []
    for loss_of in (whole, lambda h, w, t: padded_head_loss(h, w, t, chunk_bytes=chunk_bytes)):
        hidden, weight, targets = example()
        loss = loss_of(hidden, weight, targets) * 0.25
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_products_are_made_in_the_precision_autocast_chose_and_results_stay_fp32():
    hidden, weight, targets = example()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = padded_head_loss(hidden, weight, targets)
        expected = whole(hidden, weight, targets)
    loss.backward()
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(loss, whole(hidden, weight, targets))


def test_no_chance_and_no_gradient_fall_on_padding():
    logits = torch.full((2, MULTIPLE), 50.0)
    logits[:, :VOCAB] = 0.0
    losses, gradient = judge_logits(logits, torch.tensor([0, VOCAB - 1]), VOCAB)
    torch.testing.assert_close(losses, torch.full((2,), float(VOCAB)).log())
    assert not gradient[:, VOCAB:].any()
    torch.testing.assert_close(gradient.sum(dim=1), torch.zeros(2), rtol=0, atol=1e-6)


def test_a_weight_that_is_used_twice_gets_both_gradients():
    gradients = []
    for loss_of in (whole, padded_head_loss):
        _, weight, targets = example()
        loss_of(F.embedding(targets, weight), weight, targets).backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stays_so(bad):
    hidden, weight, targets = example()
    with torch.no_grad():
        hidden[0, 0, 0] = bad
    assert not torch.isfinite(padded_head_loss(hidden, weight, targets))


def test_the_vocabulary_is_padded_to_whole_tiles():
    assert [padded_vocabulary(size) for size in (1, 128, 129, 50257)] == [128, 128, 256, 50304]


@pytest.mark.parametrize("positions", [1, 127, 128, 5000, 65536])
@pytest.mark.parametrize("vocab_size", [65, 50257])
@pytest.mark.parametrize("chunk_bytes", [1, 2**26, 2**30])
def test_chunks_are_few_equal_and_no_larger_than_they_may_be(positions, vocab_size, chunk_bytes):
    rows = chunk_rows(positions, vocab_size, chunk_bytes=chunk_bytes, number_bytes=2)
    most = max(MULTIPLE, chunk_bytes // (2 * padded_vocabulary(vocab_size)))
    assert 1 <= rows <= min(positions, most)
    assert rows == positions or rows % MULTIPLE == 0
    assert -(-positions // rows) <= -(-positions // (most // MULTIPLE * MULTIPLE))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler has its own
def test_the_compiled_judge_says_what_the_plain_one_says():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(MULTIPLE, 2 * MULTIPLE, generator=generator).bfloat16()
    targets = torch.randint(0, 200, (MULTIPLE,), generator=generator)
    compiled = torch.compile(judge_logits, fullgraph=True, dynamic=False, options={"deterministic": True})
    for expected, got in zip(judge_logits(logits, targets, 200), compiled(logits, targets, 200), strict=True):
        torch.testing.assert_close(got, expected)
