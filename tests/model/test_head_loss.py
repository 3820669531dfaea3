"""The chunked loss against the loss of whole logits."""

import pytest
import torch
import torch.nn.functional as F

from model.kernels.head_loss import head_loss
from model.kernels.token_loss import token_loss

VOCAB, WIDTH = 37, 12


def example(requires_grad=True):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 5, WIDTH, generator=generator).requires_grad_(requires_grad)
    weight = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_(requires_grad)
    return hidden, weight, torch.randint(0, VOCAB, (3, 5), generator=generator)


def whole(hidden, weight, targets):
    return token_loss(F.linear(hidden, weight), targets)


@pytest.mark.parametrize("rows", [1, 4, 7, 15, 100])
def test_loss_and_gradients_are_those_of_whole_logits(rows):
    results = []
    for loss_of in (whole, lambda h, w, t: head_loss(h, w, t, chunk_bytes=rows * 4 * VOCAB)):
        hidden, weight, targets = example()
        loss = loss_of(hidden, weight, targets) * 0.25
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_products_are_made_in_the_precision_autocast_chose_and_results_stay_fp32():
    hidden, weight, targets = example()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head_loss(hidden, weight, targets)
        expected = whole(hidden, weight, targets)
    loss.backward()
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(loss, whole(hidden, weight, targets))


def test_a_weight_that_is_used_twice_gets_both_gradients():
    gradients = []
    for loss_of in (whole, head_loss):
        _, weight, targets = example()
        loss_of(F.embedding(targets, weight), weight, targets).backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)


def test_logits_never_exist_whole():
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
    assert rows - {WIDTH} == {4, 3}  # the table turned on its side is (WIDTH, VOCAB)


def test_a_loss_that_is_not_a_number_stays_one():
    hidden, weight, targets = example()
    with torch.no_grad():
        hidden[0, 0, 0] = float("nan")
    assert torch.isnan(head_loss(hidden, weight, targets))
