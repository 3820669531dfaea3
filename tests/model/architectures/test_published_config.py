"""What is read of published `config.json` files: [model] without a key set by hand, or a refusal by name."""

import json
from typing import Any

import pytest

from cairn.model.architectures.hugging_face import adopt_network, document_of, parse_config
from cairn.model.configuration.network import ModelConfig
from cairn.model.errors import InvalidInput
from cairn.model.estimates.size_estimate import count_parameters

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", "n_ctx": 1024,
    "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "layer_norm_epsilon": 1e-05, "vocab_size": 50257,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "bos_token_id": 50256, "eos_token_id": 50256,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
    "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 8192
}
LLAMA32 = SMOLLM2 | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rope_scaling": LLAMA3,
    "rope_theta": 500000.0, "vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
LLAMA2 = SMOLLM2 | {
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "rope_theta": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip


def without(document: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in names}


READ: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "gpt2": (GPT2, 124_439_808, {"n_layer": 12, "block_size": 1024, "norm_epsilon": 1e-5, "vocab_size": 50257}),
    "gpt2-medium": (GPT2 | {"n_embd": 1024, "n_head": 16, "n_layer": 24}, 354_823_168, {"n_inner": 4096}),
    "gpt2-large": (GPT2 | {"n_embd": 1280, "n_head": 20, "n_layer": 36}, 774_030_080, {"head_size": 64}),
    "gpt2-xl": (GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48}, 1_557_611_200, {"bias": True}),
    "distilgpt2": (GPT2 | {"n_layer": 6}, 81_912_576, {"tied": True}),
    "gpt2 padded to whole tiles": (GPT2 | {"vocab_size": 50304}, 124_475_904, {"vocab_size": 50304}),
    "Qwen3-0.6B": (QWEN3, 596_049_920, {"qk_norm": True, "head_size": 128, "vocab_size": 151936, "block_size": 1024}),
    "Qwen3-1.7B": (QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144}, 1_720_574_976, {"n_kv_head": 8}),
    "Qwen3-8B": (
        QWEN3
        | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36}
        | {"tie_word_embeddings": False},
        8_190_735_360,
        {"tied": False, "rotary_base": 1e6},
    ),
    "Qwen3-0.6B as transformers 5 writes it": (
        without(QWEN3, "rope_theta", "rope_scaling")
        | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "dtype": "bfloat16"}
        | {"layer_types": ["full_attention"] * 28},
        596_049_920,
        {"rotary_base": 1e6, "rotary_scaling": None},
    ),
    "SmolLM2-135M": (SMOLLM2, 134_515_008, {"qk_norm": False, "n_kv_head": 3, "head_size": 64, "norm_epsilon": 1e-5}),
    "SmolLM2-360M": (
        SMOLLM2
        | {"hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15, "num_hidden_layers": 32}
        | {"num_key_value_heads": 5},
        361_821_120,
        {"rotary_base": 1e5},
    ),
    "TinyLlama": (
        LLAMA2 | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
        1_100_048_384,
        {"tied": False, "rotary_base": 1e4, "architecture": "qwen3"},
    ),
    "Llama-2-7B": (LLAMA2, 6_738_415_616, {"n_kv_head": 32, "rotary_base": 1e4}),
    "Llama-2-7B of transformers 4.30": (
        without(LLAMA2, "num_key_value_heads", "rope_theta", "rope_scaling"), 6_738_415_616, {"n_kv_head": 32}
    ),
    "Llama-3.2-1B": (LLAMA32, 1_235_814_400, {"rotary_scaling": (32.0, 1.0, 4.0, 8192), "rotary_base": 5e5}),
    "Llama-3.1-8B": (
        LLAMA32
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": None}
        | {"rope_scaling": LLAMA3 | {"factor": 8.0}, "tie_word_embeddings": False},
        8_030_261_248,
        {"rotary_scaling": (8.0, 1.0, 4.0, 8192), "head_size": 128},
    ),
    "a Llama with linear scaling": (
        LLAMA2 | {"rope_scaling": {"type": "linear", "factor": 4.0}}, 6_738_415_616, {"rotary_scaling": (4.0,)}
    ),
    "rotations that are described twice": (
        LLAMA2 | {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        6_738_415_616,
        {"rotary_base": 5e5, "rotary_scaling": None},
    ),
    "an empty scaling beside parameters": (
        LLAMA2 | {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
        6_738_415_616,
        {"rotary_base": 5e5, "rotary_scaling": (4.0,)},
    ),
}  # fmt: skip
"""A published document, the parameters it is published with, and some keys of [model]."""


@pytest.mark.parametrize("name", READ)
def test_a_published_configuration_decides_the_network(name: str) -> None:
    document, parameters, keys = READ[name]
    model = adopt_network(parse_config(json.dumps(document).encode()), ModelConfig())
    assert {key: getattr(model, key) for key in keys} == keys
    assert count_parameters(model, 100) == parameters


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Mistral": (LLAMA2 | {"model_type": "mistral"}, ("model_type = 'mistral'", "gpt2, llama, qwen3")),
    "Gemma 3": (LLAMA2 | {"model_type": "gemma3_text"}, ("model_type = 'gemma3_text'", "gpt2, llama, qwen3")),
    "Qwen2": (QWEN3 | {"model_type": "qwen2"}, ("model_type = 'qwen2'",)),
    "Qwen3-30B-A3B": (QWEN3 | {"model_type": "qwen3_moe", "num_experts": 128}, ("model_type = 'qwen3_moe'",)),
    "no model_type": (without(GPT2, "model_type"), ("it names no model_type", "gpt2, llama, qwen3")),
    "Qwen3 with YaRN": (
        QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ("rope_scaling.rope_type = 'yarn'", "'default', 'linear' or 'llama3'"),
    ),
    "a dynamic Llama": (LLAMA2 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("= 'dynamic'",)),
    "Phi's long texts": (LLAMA2 | {"rope_scaling": {"type": "longrope"}}, ("= 'longrope'", "'llama3'")),
    "llama3 without its factors": (LLAMA2 | {"rope_scaling": {"rope_type": "llama3"}}, ("rotary_scaling",)),
    "rotations for kinds of layers": (
        QWEN3 | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        ("rope_parameters", "kinds of layers"),
    ),
    "rotations without a base": (LLAMA2 | {"rope_theta": 0}, ("rope_theta = 0",)),
    "scaling by a number": (LLAMA2 | {"rope_scaling": 4}, ("rope_scaling = 4",)),
    "rotations of a part": (LLAMA2 | {"partial_rotary_factor": 0.5}, ("partial_rotary_factor = 0.5",)),
    "biases of attention": (LLAMA2 | {"attention_bias": True}, ("attention_bias = True", "False")),
    "a sliding window": (QWEN3 | {"use_sliding_window": True}, ("use_sliding_window",)),
    "windows in some layers": (QWEN3 | {"layer_types": ["sliding_attention"]}, ("layer_types",)),
    "another function": (LLAMA2 | {"hidden_act": "gelu"}, ("hidden_act = 'gelu'", "silu")),
    "Cerebras-GPT": (GPT2 | {"activation_function": "gelu"}, ("activation_function = 'gelu'", "gelu_new")),
    "4 bits": (LLAMA2 | {"quantization_config": {"quant_method": "gptq"}}, ("quantization_config",)),
    "a text as a number": (LLAMA2 | {"hidden_size": "big"}, ("hidden_size = 'big'",)),
    "no heads": (LLAMA2 | {"num_attention_heads": 0}, ("num_attention_heads = 0",)),
    "a GPT-2 without an end": (GPT2 | {"n_layer": 10**9}, ("n_layer = 1000000000", "4096")),
    "a Llama without an end": (LLAMA2 | {"num_hidden_layers": 10**9}, ("num_hidden_layers = 1000000000", "4096")),
    "heads that share nothing": (LLAMA2 | {"num_key_value_heads": 5}, ("n_kv_head=5",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_here_is_refused_by_name(name: str) -> None:
    document, words = REFUSED[name]
    with pytest.raises(InvalidInput, match=r"^config\.json: ") as refused:
        adopt_network(parse_config(json.dumps(document).encode()), ModelConfig())
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n_layer": 3}, ("model.n_layer = 3", "use model.n_layer = 30")),
        ({"n_embd": 100}, ("model.n_embd = 100", "use model.n_embd = 576")),
        ({"vocab_size": 49153}, ("model.vocab_size = 49153", "use model.vocab_size = 49152")),
        ({"rotary_scaling": (2.0,)}, ("model.rotary_scaling = [2.0]", "leave it out")),
        ({"tied": False}, ("model.tied = false", "use model.tied = true")),
        ({"architecture": "gpt2"}, ("model_type = 'llama'", 'model.architecture = "qwen3"')),
        ({"qk_norm": True}, ("model_type = 'llama'", "model.qk_norm = false")),
        ({"block_size": 8193}, ("model.block_size = 8193", "8192 positions")),
    ],
)
def test_a_key_given_by_hand_is_compared(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput) as refused:
        adopt_network(parse_config(json.dumps(SMOLLM2).encode()), ModelConfig(**given))
    assert [word for word in words if word not in str(refused.value)] == []


def test_a_key_given_by_hand_that_is_the_run_s_own_is_kept() -> None:
    model = adopt_network(parse_config(json.dumps(SMOLLM2).encode()), ModelConfig(dropout=0.2, block_size=2048))
    assert (model.dropout, model.block_size, model.n_layer) == (0.2, 2048, 30)


@pytest.mark.parametrize("name", READ)
def test_the_configuration_of_an_export_is_that_of_its_weights(name: str) -> None:
    document, _, _ = READ[name]
    found = parse_config(text := json.dumps(document | {"auto_map": {"AutoConfig": "code.Config"}}).encode())
    model = adopt_network(found, ModelConfig(dropout=0.3))
    made = document_of(model, ids=100, end_of_text_id=7, begun_from=text.decode())
    assert made == without(document, "dtype", "n_ctx") | {"torch_dtype": "float32"}
