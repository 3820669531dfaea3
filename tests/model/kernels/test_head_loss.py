"""The fused heads against the loss of whole logits: in chunks on a CPU, padded to whole tiles for matrix units."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from cairn.model.kernels.head_loss import (
    TILE,
    chunk_rows,
    head_loss,
    loss_and_gradient,
    padded_vocabulary,
    token_loss,
)

PADDED = partial(head_loss, is_padded=True)
VOCAB, WIDTH = 37, 12
SMALL, LARGE = (3, 5), (3, 130)  # windows and positions; the large example has more than one tile of rows
HEADS = pytest.mark.parametrize(
    ("head", "size", "rtol"), [(head_loss, SMALL, 1e-6), (PADDED, LARGE, 1e-5)], ids=["chunked", "padded"]
)


def example(size=SMALL):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(*size, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, size, generator=generator)


def whole(hidden, weight, targets):
    return token_loss(F.linear(hidden, weight), targets)


def whole_with_penalty(hidden, weight, targets):
    logits = F.linear(hidden, weight)
    return token_loss(logits, targets) + 0.01 * logits.logsumexp(dim=-1).square().mean()


@pytest.mark.parametrize(
    ("head", "size", "rtol", "chunk_bytes"),
    [
        *((head_loss, SMALL, 1e-6, rows * 4 * VOCAB) for rows in (1, 4, 7, 15, 100)),
        *((PADDED, LARGE, 1e-5, chunk_bytes) for chunk_bytes in (1, 4 * TILE * 256, 2**30)),
    ],
)
def test_loss_and_gradients_are_those_of_whole_logits(head, size, rtol, chunk_bytes) -> None:
    results = []
    for loss_of in (whole, lambda h, w, t: head(h, w, t, chunk_bytes=chunk_bytes)):
        hidden, weight, targets = example(size)
        loss = loss_of(hidden, weight, targets) * 0.25
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-6)


@HEADS
def test_a_z_loss_is_in_the_gradient_and_not_in_the_value(head, size, rtol) -> None:
    results = []
    for loss_of in (whole_with_penalty, lambda h, w, t: head(h, w, t, 0.01)):
        hidden, weight, targets = example(size)
        loss_of(hidden, weight, targets).backward()
        results.append((hidden.grad, weight.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-6)
    hidden, weight, targets = example(size)
    torch.testing.assert_close(head(hidden, weight, targets, 0.01), head(hidden, weight, targets), rtol=0, atol=0)


def test_whole_logits_have_the_z_loss_in_the_gradient_alone() -> None:
    hidden, weight, targets = example()
    loss = token_loss(F.linear(hidden, weight), targets, 0.01)
    loss.backward()
    assert torch.equal(loss, whole(hidden, weight, targets))
    again, _, _ = example()
    whole_with_penalty(again, weight.detach(), targets).backward()
    torch.testing.assert_close(hidden.grad, again.grad)


@HEADS
def test_products_use_autocasts_precision_and_results_stay_fp32(head, size, rtol) -> None:
    hidden, weight, targets = example(size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(hidden, weight, targets)
        expected = whole(hidden, weight, targets)
    loss.backward()
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(loss, whole(hidden, weight, targets))


@HEADS
def test_a_weight_that_is_used_twice_gets_both_gradients(head, size, rtol) -> None:
    gradients = []
    for loss_of in (whole, head):
        _, weight, targets = example(size)
        loss_of(F.embedding(targets, weight), weight, targets).backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=rtol, atol=1e-6)


@HEADS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stays_so(head, size, rtol, bad) -> None:
    hidden, weight, targets = example(size)
    with torch.no_grad():
        hidden[0, 0, 0] = bad
    assert not torch.isfinite(head(hidden, weight, targets))


def test_the_chunked_head_turns_not_a_number_into_not_a_number() -> None:
    hidden, weight, targets = example()
    with torch.no_grad():
        hidden[0, 0, 0] = float("nan")
    assert torch.isnan(head_loss(hidden, weight, targets))


def test_whole_logits_never_exist_in_the_chunked_head() -> None:
    hidden, weight, targets = example()
    seen = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                seen.append(tuple(result.shape))
            return result

    with Sizes():
        head_loss(hidden, weight, targets, chunk_bytes=4 * 4 * VOCAB).backward()
    rows = {shape[0] for shape in seen if shape[1:] == (VOCAB,)}
    assert rows - {WIDTH} == {4, 3}  # the transposed table is (WIDTH, VOCAB)


def test_padding_has_neither_probability_nor_gradient() -> None:
    logits = torch.full((2, TILE), 50.0)
    logits[:, :VOCAB] = 0.0
    losses, gradient = loss_and_gradient(logits, torch.tensor([0, VOCAB - 1]), VOCAB)
    torch.testing.assert_close(losses, torch.full((2,), float(VOCAB)).log())
    assert not gradient[:, VOCAB:].any()
    torch.testing.assert_close(gradient.sum(dim=1), torch.zeros(2), rtol=0, atol=1e-6)


def test_the_vocabulary_is_padded_to_whole_tiles() -> None:
    assert [padded_vocabulary(size) for size in (1, 128, 129, 50257)] == [128, 128, 256, 50304]


@pytest.mark.parametrize("positions", [1, 127, 128, 5000, 65536])
@pytest.mark.parametrize("vocab_size", [65, 50257])
@pytest.mark.parametrize("chunk_bytes", [1, 2**26, 2**30])
def test_chunks_are_few_equal_and_no_larger_than_they_may_be(positions, vocab_size, chunk_bytes) -> None:
    rows = chunk_rows(positions, vocab_size, chunk_bytes=chunk_bytes, number_bytes=2)
    most = max(TILE, chunk_bytes // (2 * padded_vocabulary(vocab_size)))
    assert 1 <= rows <= min(positions, most)
    assert rows == positions or rows % TILE == 0
    assert -(-positions // rows) <= -(-positions // (most // TILE * TILE))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler has its own
def test_the_compiled_loss_and_gradient_equal_the_plain_ones() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TILE, 2 * TILE, generator=generator).bfloat16()
    targets = torch.randint(0, 200, (TILE,), generator=generator)
    compiled = torch.compile(loss_and_gradient, fullgraph=True, dynamic=False, options={"deterministic": True})
    for expected, got in zip(loss_and_gradient(logits, targets, 200), compiled(logits, targets, 200), strict=True):
        torch.testing.assert_close(got, expected)
