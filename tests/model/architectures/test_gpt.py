"""The network."""

import math

import pytest
import torch

from cairn.model.architectures.gpt import GPT, same_document_mask
from cairn.model.configuration.network import ModelConfig
from cairn.model.errors import InvalidInput
from cairn.model.kernels.head_loss import token_loss

CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16)


def make(config=CONFIG, vocab_size=61, **more):
    torch.manual_seed(0)
    return GPT(config, vocab_size, **more)


def tokens(rows=4, length=16, vocab_size=61):
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def test_logits_have_one_score_per_position_and_token() -> None:
    assert make()(tokens()).shape == (4, 16, 61)


def test_the_initial_loss_is_that_of_guessing() -> None:
    ids = tokens(32)
    loss = token_loss(make()(ids[:, :-1]), ids[:, 1:])
    assert abs(loss.item() - math.log(61)) < 0.1


def test_the_head_is_the_embedding_stored_once() -> None:
    names = [name for name, _ in make().named_parameters()]
    assert not any("head" in name for name in names) and names.count("wte.weight") == 1


def test_residual_projections_start_smaller_by_the_root_of_twice_the_layers() -> None:
    weights = dict(make(ModelConfig(n_layer=8, n_head=2, n_embd=128, block_size=8)).named_parameters())
    ratio = weights["h.0.mlp.c_fc.weight"].std() / weights["h.0.mlp.c_proj.weight"].std()
    assert abs(ratio.item() - 4.0) < 0.1


def test_a_sequence_longer_than_the_block_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"17 tokens.*block_size=16"):
        make()(tokens(length=17))


END = 60


def with_boundaries(*places, rows=4, length=16):
    ids = tokens(rows, length, vocab_size=END)
    ids[:, list(places)] = END
    return ids


def masked(boundary_id=END, config=CONFIG, **more):
    model = make(config, **more).eval()
    model.boundary_id = boundary_id
    return model


@pytest.mark.parametrize("ends", [(5,), (5, 6, 11), (0, 15)])
def test_masked_each_token_sees_its_own_document_up_to_itself(ends) -> None:
    ids = with_boundaries(*ends, rows=1)[0].tolist()
    document = [sum(token == END for token in ids[: place + 1]) for place in range(16)]
    expected = [[document[key] == document[query] and key <= query for key in range(16)] for query in range(16)]
    assert same_document_mask(torch.tensor([ids]), END)[0, 0].tolist() == expected


@pytest.mark.parametrize("length", [16, 600])  # beyond 512 keys the kernel works in blocks, some wholly hidden
@pytest.mark.parametrize("training", [False, True])
def test_masked_the_tokens_of_a_document_change_no_logit_of_the_next(length, training) -> None:
    model = masked(config=CONFIG.model_copy(update={"block_size": 600})).train(training)
    border = length - 7
    ids = with_boundaries(border, length=length)
    changed = ids.clone()
    changed[:, :border] = (ids[:, :border] + 1) % END
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, border:], after[:, border:]) and not torch.equal(before, after)


def test_masked_a_later_document_changes_no_gradient_of_an_earlier_one() -> None:
    gradients = []
    for shift in (0, 1):
        model, ids = masked(), with_boundaries(9)
        ids[:, 10:] = (ids[:, 10:] + shift) % END
        model(ids)[:, :9].sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_unmasked_an_earlier_document_is_visible() -> None:
    model, ids = make(), with_boundaries(9)
    changed = ids.clone()
    changed[:, :9] = (ids[:, :9] + 1) % END
    assert not torch.equal(model(ids)[:, 10:], model(changed)[:, 10:])


def test_a_window_within_one_document_has_the_same_logits_masked_or_not() -> None:
    ids = tokens(vocab_size=END)
    torch.testing.assert_close(masked()(ids), make().eval()(ids))


def test_masked_positions_are_not_reset_between_documents() -> None:
    model, ids = masked(), with_boundaries(8)
    alone = model(ids[:, 8:])
    assert not torch.allclose(model(ids)[:, 8:], alone)
    with torch.no_grad():
        model.wpe.weight.copy_(model.wpe.weight[0].expand_as(model.wpe.weight))
    torch.testing.assert_close(model(ids)[:, 8:], model(ids[:, 8:]))
