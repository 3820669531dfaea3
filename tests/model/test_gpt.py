"""The network."""

import math

import pytest
import torch

from model.configuration import ModelConfig
from model.errors import InvalidInput
from model.gpt import GPT
from model.loss import token_loss

CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16)


def make(config=CONFIG, vocab_size=61, **more):
    torch.manual_seed(0)
    return GPT(config, vocab_size, **more)


def tokens(rows=4, length=16, vocab_size=61):
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def test_logits_have_one_score_per_position_and_token():
    assert make()(tokens()).shape == (4, 16, 61)


def test_the_initial_loss_is_that_of_guessing():
    ids = tokens(32)
    loss = token_loss(make()(ids[:, :-1]), ids[:, 1:])
    assert abs(loss.item() - math.log(61)) < 0.1


def test_no_position_sees_a_later_token():
    model, ids = make(), tokens()
    changed = ids.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 61
    assert torch.equal(model(ids)[:, :10], model(changed)[:, :10])


def test_a_position_sees_an_earlier_token():
    model, ids = make(), tokens()
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 61
    assert not torch.equal(model(ids)[:, 10], model(changed)[:, 10])


def test_the_head_is_the_embedding_and_stored_once():
    names = [name for name, _ in make().named_parameters()]
    assert not any("head" in name for name in names) and names.count("wte.weight") == 1


def test_the_parameter_count_leaves_the_position_table_out():
    # 12 C^2 + 13 C per layer with biases, final norm 2 C, embedding V C.
    assert make().parameter_count == 2 * (12 * 32**2 + 13 * 32) + 2 * 32 + 61 * 32


def test_gpt2_small_has_its_published_size():
    with torch.device("meta"):
        model = GPT(ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024), 50257)
    assert model.parameter_count + 1024 * 768 == 124_439_808


def test_without_bias_there_is_no_bias():
    model = make(CONFIG.model_copy(update={"bias": False}))
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


def test_residual_projections_start_smaller_by_the_root_of_twice_the_layers():
    weights = dict(make(ModelConfig(n_layer=8, n_head=2, n_embd=128, block_size=8)).named_parameters())
    ratio = weights["h.0.mlp.c_fc.weight"].std() / weights["h.0.mlp.c_proj.weight"].std()
    assert abs(ratio.item() - 4.0) < 0.1


def test_activation_checkpointing_changes_no_bit_of_the_gradients_even_with_dropout():
    config = CONFIG.model_copy(update={"dropout": 0.2})
    gradients = []
    for recompute in (False, True):
        model = make(config, activation_checkpointing=recompute).train()
        torch.manual_seed(7)
        token_loss(model(tokens()), tokens()).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_sequence_longer_than_the_block_is_refused():
    with pytest.raises(InvalidInput, match=r"17 tokens.*block_size=16"):
        make()(tokens(length=17))
