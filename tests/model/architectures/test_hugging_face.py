"""Names, transposes and settings of Hugging Face's GPT-2, both ways."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from cairn.model.architectures.gpt import GPT
from cairn.model.architectures.hugging_face import (
    HuggingFaceConfig,
    check_settings,
    config_of,
    from_hugging_face,
    parse_config,
)
from cairn.model.architectures.hugging_face import to_hugging_face as converted
from cairn.model.configuration.network import ModelConfig
from cairn.model.errors import InvalidInput

VOCAB = 31
CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=8, block_size=6)
Arrays = dict[str, Any]


def weights(config: ModelConfig = CONFIG) -> Arrays:
    """Our weights, every one of them, biases too, unlike any other."""
    generator = torch.Generator().manual_seed(3)
    named = GPT(config, VOCAB).named_parameters()
    return {name: torch.randn(parameter.shape, generator=generator).numpy() for name, parameter in named}


def to_hugging_face(arrays: Arrays, config: ModelConfig = CONFIG) -> Arrays:
    return converted(arrays, config, VOCAB)


def described(config: ModelConfig = CONFIG, **changes: Any) -> HuggingFaceConfig:
    found = config_of(config, vocab_size=VOCAB, end_of_text_id=30)
    return parse_config(json.dumps({**found.model_dump(mode="json"), **changes}).encode())


def same(first: Arrays, second: Arrays) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("bias", [True, False])
def test_there_and_back_every_bit_is_the_same(bias: bool) -> None:
    config = CONFIG.model_copy(update={"bias": bias})
    assert same(from_hugging_face(to_hugging_face(weights(config), config), config, VOCAB), weights(config))


def test_every_linear_is_transposed_and_nothing_else() -> None:
    theirs, ours = to_hugging_face(weights()), weights()
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        assert np.array_equal(theirs[f"transformer.h.1.{name}.weight"], ours[f"h.1.{name}.weight"].T)
    assert np.array_equal(theirs["transformer.wte.weight"], ours["wte.weight"])


def test_a_network_without_biases_gets_zeros_there() -> None:
    config = CONFIG.model_copy(update={"bias": False})
    theirs = to_hugging_face(weights(config), config)
    assert theirs.keys() == to_hugging_face(weights()).keys()
    assert not any(theirs[name].any() for name in theirs if name.endswith(".bias"))
    assert theirs["transformer.h.0.attn.c_attn.bias"].shape == (24,)


def test_the_original_layout_is_read_too() -> None:
    """No prefix, the causal masks of old files, the head written a second time."""
    old = {name.removeprefix("transformer."): array for name, array in to_hugging_face(weights()).items()}
    masks = {"h.0.attn.bias": np.ones((1, 1, 6, 6), bool), "h.1.attn.masked_bias": np.array(-1e4, np.float32)}
    assert same(from_hugging_face({**old, **masks, "lm_head.weight": old["wte.weight"]}, CONFIG, VOCAB), weights())


def test_a_shorter_context_keeps_the_first_positions() -> None:
    short = CONFIG.model_copy(update={"block_size": 4})
    found = from_hugging_face(to_hugging_face(weights()), short, VOCAB)
    assert np.array_equal(found["wpe.weight"], weights()["wpe.weight"][:4])
    check_settings(described(), short)


def test_half_precision_becomes_float32() -> None:
    halves = {name: array.astype(np.float16) for name, array in to_hugging_face(weights()).items()}
    assert {array.dtype for array in from_hugging_face(halves, CONFIG, VOCAB).values()} == {np.dtype(np.float32)}


def spoiled(name: str, array: Any) -> Arrays:
    theirs = {**to_hugging_face(weights()), f"transformer.{name}": array}
    return {key: value for key, value in theirs.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        pytest.param(spoiled("h.1.ln_2.bias", None), ("missing", "h.1.ln_2.bias"), id="missing"),
        pytest.param(spoiled("h.2.ln_1.bias", np.zeros(8)), ("unexpected", "h.2.ln_1.bias"), id="another layer"),
        pytest.param(spoiled("wte.weight", np.zeros((40, 8))), ("wte.weight", "(40, 8)", "(31, 8)"), id="shape"),
        pytest.param(spoiled("ln_f.bias", np.zeros(8, np.int8)), ("ln_f.bias", "int8", "rule"), id="quantized"),
        pytest.param(spoiled("ln_f.bias", np.full(8, np.nan)), ("ln_f.bias", "not finite"), id="not finite"),
        pytest.param(
            {**to_hugging_face(weights()), "lm_head.weight": np.zeros((31, 8))}, ("lm_head", "rule"), id="untied head"
        ),
    ],
)
def test_weights_that_are_no_such_network_are_refused_by_name(tensors: Arrays, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_hugging_face(tensors, CONFIG, VOCAB)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_bias_that_says_something_is_not_thrown_away() -> None:
    with pytest.raises(InvalidInput, match=r"model.bias = false: .* use model.bias = true"):
        from_hugging_face(to_hugging_face(weights()), CONFIG.model_copy(update={"bias": False}), VOCAB)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_layer": 12, "n_head": 4}, ("model.n_layer = 2, model.n_head = 2", "use model.n_layer = 12, model.n_head")),
        ({"n_positions": 5}, ("model.block_size = 6", "5 positions", "use model.block_size = 5 or less")),
        ({"activation_function": "relu"}, ("activation_function = 'relu'", "gelu_new")),
        ({"n_inner": 20}, ("n_inner = 20", "32")),
        ({"layer_norm_epsilon": 1e-6}, ("model.norm_epsilon = 1e-05", "use model.norm_epsilon = 1e-06")),
        ({"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx", "False")),
        ({"tie_word_embeddings": False}, ("tie_word_embeddings", "True")),
    ],
)
def test_settings_of_another_network_are_refused_with_the_rule(changes: Arrays, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_settings(described(**changes), CONFIG)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_configuration_that_says_little_has_the_librarys_defaults() -> None:
    found = parse_config(b'{"model_type": "gpt2", "some_new_key": 1}')
    assert found.model_type == "gpt2"
    assert (found.n_layer, found.n_head, found.n_embd, found.n_positions, found.vocab_size) == (
        12,
        12,
        768,
        1024,
        50257,
    )
