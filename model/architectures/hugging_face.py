"""Networks that `transformers` knows, GPT-2, Llama and Qwen3: their `config.json`, and weights to and from their names.

Imports no torch. Source: transformers, models/gpt2 (Conv1D stores weights as (in, out), a Linear as (out, in); biases
are always there; the head is the token embedding), models/llama and models/qwen3 (one Linear for each matrix).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from cairn.model.configuration.network import Family, ModelConfig, Parameter, family_of, parameter_table
from cairn.model.errors import InvalidInput

Arrays = Mapping[str, NDArray[Any]]

HEAD = "lm_head.weight"
_BUFFER = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)\Z")
"""Causal masks and frequencies in old files, which are ignored."""
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
_SETTINGS: Mapping[Family, str] = {
    "gpt2": 'model.architecture = "gpt2"',
    "llama": 'model.architecture = "qwen3" and model.qk_norm = false',
    "qwen3": 'model.architecture = "qwen3"',
}
_GPT2_KEYS = {**{key: key for key in ("n_layer", "n_head", "n_embd", "n_inner")}, "layer_norm_epsilon": "norm_epsilon"}
_LLAMA_KEYS = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "head_dim": "head_size",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rotary_base",
    "tie_word_embeddings": "tied",
}
"""The keys of [model] by their names in a `config.json`."""


class _Config(BaseModel):
    """Missing keys have the library's defaults, unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vocab_size: int
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    torch_dtype: str | None = "float32"


class Gpt2Config(_Config):
    """A `config.json` of the GPT-2 family."""

    model_type: Literal["gpt2"] = "gpt2"
    architectures: tuple[str, ...] | None = ("GPT2LMHeadModel",)
    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256

    def settings(self) -> Mapping[str, Any]:
        """Return the keys of [model] that these weights need, with their values."""
        named = {ours: getattr(self, theirs) for theirs, ours in _GPT2_KEYS.items()}
        return named | {"n_inner": self.n_inner or 4 * self.n_embd}

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield each name whose value is no part of [model], whether it is one that is computed here, and the rule."""
        yield "activation_function", self.activation_function in _TANH_GELU, f"one of {', '.join(_TANH_GELU)}"
        yield "scale_attn_weights", self.scale_attn_weights, "true"
        yield "scale_attn_by_inverse_layer_idx", not self.scale_attn_by_inverse_layer_idx, "false"
        yield "add_cross_attention", not self.add_cross_attention, "false"
        yield "tie_word_embeddings", self.tie_word_embeddings, "true"


class LlamaConfig(_Config):
    """A `config.json` of Llama, and of Qwen3, which adds norms of queries and keys."""

    model_type: Literal["llama", "qwen3"]
    architectures: tuple[str, ...] | None = None
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    use_sliding_window: bool = False

    def settings(self) -> Mapping[str, Any]:
        """Return the keys of [model] that these weights need, with their values."""
        default_head = 128 if self.model_type == "qwen3" else self.hidden_size // self.num_attention_heads
        theta = self.rope_theta or (self.rope_parameters or {}).get("rope_theta", 10_000.0)
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        named = {ours: getattr(self, theirs) for theirs, ours in _LLAMA_KEYS.items()}
        return named | {"n_kv_head": kv_heads, "head_size": self.head_dim or default_head, "rotary_base": theta}

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield each name whose value is no part of [model], whether it is one that is computed here, and the rule."""
        yield "hidden_act", self.hidden_act == "silu", "silu"
        for name in ("rope_scaling", "rope_parameters"):
            scaled = getattr(self, name) or {}
            yield name, scaled.get("rope_type", scaled.get("type", "default")) == "default", "no scaling of rotations"
        yield "attention_bias", not self.attention_bias, "false"
        yield "mlp_bias", not self.mlp_bias, "false"
        yield "use_sliding_window", not self.use_sliding_window, "false"


HuggingFaceConfig = Gpt2Config | LlamaConfig
_ADAPTER: TypeAdapter[HuggingFaceConfig] = TypeAdapter(Annotated[HuggingFaceConfig, Field(discriminator="model_type")])


def parse_config(document: bytes) -> HuggingFaceConfig:
    """Return what a `config.json` says; raises pydantic's `ValidationError`, also for any other architecture."""
    return _ADAPTER.validate_json(document)


def config_of(model: ModelConfig, *, vocab_size: int, end_of_text_id: int) -> HuggingFaceConfig:
    """Make the `config.json` of a network; raises InvalidInput where `transformers` has no such network."""
    family = require_family(model)
    names = _GPT2_KEYS if family == "gpt2" else _LLAMA_KEYS
    values: dict[str, Any] = {theirs: getattr(model, ours) for theirs, ours in names.items()}
    values |= {"vocab_size": vocab_size, "bos_token_id": end_of_text_id, "eos_token_id": end_of_text_id}
    if family == "gpt2":
        values |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
        values["n_inner"] = None if model.n_inner == 4 * model.n_embd else model.n_inner
        return Gpt2Config(**values, n_positions=model.block_size)
    # Rotations are written as `rope_theta`, which older readers know too.
    values |= {"architectures": (f"{family.capitalize()}ForCausalLM",), "attention_dropout": model.dropout}
    return LlamaConfig(**values, model_type=family, max_position_embeddings=model.block_size)


def require_family(model: ModelConfig) -> Family:
    """Return the architecture of `transformers` that this network is; raises InvalidInput where there is none."""
    family = family_of(model)
    if family is None:
        preset = ModelConfig(architecture=model.architecture)
        names = ("norm", "norm_gain", "positions", "feed_forward", "bias", "tied", "qk_norm", "ngram_rows")
        other = [name for name in names if getattr(model, name) != getattr(preset, name)]
        said = ", ".join(f"model.{name} = {_toml(getattr(model, name))}" for name in other)
        rule = "a gpt2, a qwen3 or a llama as their architectures are; weights of this run can be read with safetensors"
        raise InvalidInput(f"{said or 'its heads'}: transformers has no such network; rule: {rule}")
    return family


def check_settings(found: HuggingFaceConfig, model: ModelConfig) -> None:
    """Raise InvalidInput where `found` is another network, naming values for [model]; a smaller block_size will do."""
    if family_of(model) != found.model_type:
        problem = f"model_type = {found.model_type!r}, and [model] describes another network"
        rule = f"the same architecture; use {_SETTINGS[found.model_type]} without other keys of it"
        raise InvalidInput(f"config.json: {problem}; rule: {rule}")
    settings = found.settings()
    wrong = [name for name, value in settings.items() if getattr(model, name) != value]
    if wrong:
        has = ", ".join(f"model.{name} = {_toml(getattr(model, name))}" for name in wrong)
        wanted = ", ".join(f"model.{name} = {_toml(settings[name])}" for name in wrong)
        raise InvalidInput(f"{has}: the weights are of another shape; rule: equal to config.json; use {wanted}")
    positions = found.n_positions if isinstance(found, Gpt2Config) else found.max_position_embeddings
    if model.block_size > positions:
        rule = f"rule: at most that; use model.block_size = {positions} or less"
        raise InvalidInput(f"model.block_size = {model.block_size}: the weights have {positions} positions; {rule}")
    for name, holds, rule in found.rules():
        if not holds:
            value = getattr(found, name)
            raise InvalidInput(f"config.json: {name} = {value!r}; rule: {rule}; no other kind is trained here")


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)


def to_hugging_face(weights: Arrays, model: ModelConfig, vocab_size: int) -> dict[str, NDArray[Any]]:
    """Rename weights to those of `transformers`; a bias or gain that only it has gets its neutral value.

    Raises InvalidInput where it has no such network. A tied head is not written.
    """
    renamed: dict[str, NDArray[Any]] = {}
    dtype = next(iter(weights.values())).dtype
    for row in _complete_table(model, vocab_size):
        array = weights[row.name] if row.name in weights else np.full(row.shape, row.constant, dtype=dtype)
        # Matrices that were joined for one product are taken apart, where the library keeps them apart.
        parts = [array] if len(row.theirs) == 1 else np.split(array, np.cumsum(row.rows)[:-1])
        for name, part in zip(row.theirs, parts, strict=True):
            renamed[name] = np.ascontiguousarray(part.T) if row.is_transposed else part  # (out, in) -> (in, out)
    return renamed


def from_hugging_face(tensors: Arrays, model: ModelConfig, vocab_size: int) -> dict[str, NDArray[np.float32]]:
    """Rename weights of `transformers`, with or without their prefix, to this network's, in float32.

    Causal masks and a head equal to the embedding are ignored. Raises InvalidInput naming tensors that are missing,
    unexpected, of another shape, not finite, or a bias or gain that [model] leaves out and is not neutral.
    """
    family = require_family(model)
    prefix = "transformer." if family == "gpt2" else ""  # before all names but in files saved without the head
    found = {
        name if name == HEAD or name.startswith(prefix) else f"{prefix}{name}": array
        for name, array in tensors.items()
        if not _BUFFER.search(name)
    }
    table = _complete_table(model, vocab_size)
    if model.tied:
        head, (embedding,) = found.pop(HEAD, None), table[0].theirs
        if head is not None and embedding in found and not np.array_equal(head, found[embedding]):
            raise InvalidInput(f"{HEAD} differs from {embedding}; rule: the head is the token embedding, held once")
    wanted = {name for row in table for name in row.theirs}
    for word, names in (("missing", wanted - found.keys()), ("unexpected", found.keys() - wanted)):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise InvalidInput(f"{word} weights: {listed}; rule: exactly those of a {family} of [model]'s shape")
    own = {row.name for row in parameter_table(model, vocab_size)}
    converted = {row.name: _join(row, found) for row in table}
    for row in table:
        if row.name not in own and np.any(converted[row.name] != row.constant):
            key = "bias" if row.kind == "bias" else "norm_gain"
            problem = f"{row.theirs[0]} of the weights is not {row.constant:g}"
            raise InvalidInput(f"model.{key} = false: {problem}; rule: use model.{key} = true")
    return {name: array for name, array in sorted(converted.items()) if name in own}


def _complete_table(model: ModelConfig, vocab_size: int) -> tuple[Parameter, ...]:
    """Return the table with the biases and gains that the network of `transformers` always has."""
    changes = {"bias": require_family(model) == "gpt2", "norm_gain": True}
    return parameter_table(model.model_copy(update=changes), vocab_size)


def _join(row: Parameter, found: Arrays) -> NDArray[np.float32]:
    rows = row.rows if len(row.theirs) > 1 else (sum(row.rows),)
    parts = [_convert(row, name, found[name], count) for name, count in zip(row.theirs, rows, strict=True)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _convert(row: Parameter, name: str, array: NDArray[Any], rows: int) -> NDArray[np.float32]:
    shape = (rows, *row.shape[1:])
    if row.kind == "positions":
        array = array[:rows]  # (positions, C) -> (block_size, C)
    ours = array.T if row.is_transposed else array  # (in, out) -> (out, in)
    if ours.shape != shape:
        expected = shape[::-1] if row.is_transposed else shape
        raise InvalidInput(f"{name} has shape {array.shape}; rule: {expected} by [model]")
    if not np.issubdtype(ours.dtype, np.floating):
        raise InvalidInput(f"{name} is {ours.dtype}; rule: floating point; quantized weights cannot be trained on")
    converted = np.ascontiguousarray(ours, dtype=np.float32)
    if not np.isfinite(converted).all():
        raise InvalidInput(f"{name} holds values that are not finite; rule: weights to begin from are finite")
    return converted
