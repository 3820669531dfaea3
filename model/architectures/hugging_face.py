"""Networks that `transformers` knows, GPT-2, Llama and Qwen3: their `config.json`, and weights to and from its names.

Imports no torch. Source: transformers, models/gpt2 (Conv1D stores weights as (in, out), a Linear as (out, in); biases
are always there; the head is the token embedding), llama, qwen3 (a Linear for each matrix) and modeling_rope_utils.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from cairn.model.configuration import network
from cairn.model.configuration.network import Family, ModelConfig, Positive, PositiveNumber, family_of
from cairn.model.errors import InvalidInput

_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_Layers = Annotated[int, Field(gt=0, le=4096)]
"""Each layer is a row of the table of parameters, which a file must not make endless; published networks have 126."""
_MOST_POSITIONS = 1024
"""The block_size of a run that names none: published networks have room for texts that few machines can train on."""

_One = Annotated[float, Field(ge=1, le=1)]


class _Config(BaseModel):
    """Missing keys have the library's defaults, unknown keys are ignored; a type says which networks are computed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vocab_size: Positive
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    torch_dtype: str | None = "float32"
    quantization_config: Annotated[dict[str, Any], Field(max_length=0)] | None = None


class Gpt2Config(_Config):
    """A `config.json` of the GPT-2 family."""

    model_type: Literal["gpt2"] = "gpt2"
    architectures: tuple[str, ...] | None = ("GPT2LMHeadModel",)
    vocab_size: Positive = 50257
    n_positions: Positive = 1024
    n_embd: Positive = 768
    n_layer: _Layers = 12
    n_head: Positive = 12
    n_inner: Positive | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: Literal[True] = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256

    def settings(self) -> Mapping[str, Any]:
        """Return the keys of [model] that these weights need, with their values."""
        named = {ours: getattr(self, theirs) for theirs, ours in network.transformers()["keys"]["gpt2"].items()}
        return named | {"n_inner": self.n_inner or 4 * self.n_embd}


class RopeConfig(BaseModel):
    """Rotations in a `config.json`; kinds that depend on the length of a text, and YaRN's, are not computed here."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["default", "linear", "llama3"] = "default"
    rope_theta: PositiveNumber | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: _One = 1.0

    @model_validator(mode="before")
    @classmethod
    def _name_of_older_files(cls, document: Any) -> Any:
        if isinstance(document, dict) and any(isinstance(value, dict) for value in document.values()):
            raise ValueError("rotations of their own for kinds of layers are not computed here")
        older = isinstance(document, dict) and "type" in document
        return {"rope_type": document["type"], **document} if older else document


class LlamaConfig(_Config):
    """A `config.json` of Llama, and of Qwen3, which adds norms of queries and keys."""

    model_type: Literal["llama", "qwen3"]
    architectures: tuple[str, ...] | None = None
    hidden_size: Positive = 4096
    intermediate_size: Positive = 11008
    num_hidden_layers: _Layers = 32
    num_attention_heads: Positive = 32
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: Positive = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: PositiveNumber | None = None
    rope_scaling: RopeConfig | None = None
    rope_parameters: RopeConfig | None = None
    partial_rotary_factor: _One = 1.0
    tie_word_embeddings: bool = False
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    attention_dropout: float = 0.0
    use_sliding_window: Literal[False] = False
    layer_types: tuple[Literal["full_attention"], ...] | None = None

    @property
    def rope(self) -> RopeConfig:
        """The rotations, wherever they are described; an empty description is none."""
        found = (one for one in (self.rope_scaling, self.rope_parameters) if one and one.model_fields_set)
        return next(found, RopeConfig())

    def settings(self) -> Mapping[str, Any]:
        """Return the keys of [model] that these weights need, with their values."""
        default_head = 128 if self.model_type == "qwen3" else self.hidden_size // self.num_attention_heads
        scaled = {"default": 0, "linear": 1, "llama3": 4}[self.rope.rope_type]
        named = {ours: getattr(self, theirs) for theirs, ours in network.transformers()["keys"]["llama"].items()}
        return named | {
            "n_kv_head": self.num_key_value_heads or self.num_attention_heads,
            "head_size": self.head_dim or default_head,
            "rotary_base": self.rope.rope_theta or self.rope_theta or 10_000.0,
            "rotary_scaling": tuple(getattr(self.rope, name) for name in _SCALING_KEYS[:scaled]) or None,
        }


HuggingFaceConfig = Gpt2Config | LlamaConfig
_ADAPTER: TypeAdapter[HuggingFaceConfig] = TypeAdapter(Annotated[HuggingFaceConfig, Field(discriminator="model_type")])


def parse_config(document: bytes) -> HuggingFaceConfig:
    """Return what a `config.json` says; raises InvalidInput, also for any other architecture."""
    try:
        return _ADAPTER.validate_json(document)
    except ValidationError as error:
        first = error.errors()[0]
        kind, (where, value) = first.get("ctx", {}).get("tag"), (first["loc"][1:], first["input"])
        problem = f"{'.'.join(map(str, where)) or 'the document'} = {value!r}: {first['msg']}"
        if first["type"].startswith("union_tag"):
            problem = f"model_type = {kind!r}" if kind else "it names no model_type"
        raise InvalidInput(f"config.json: {problem}; rule: that of a {', '.join(get_args(Family))}") from error


def adopt_network(found: HuggingFaceConfig, model: ModelConfig) -> ModelConfig:
    """Return [model] with the values of `found` for each key that was not given by hand.

    Raises InvalidInput for a key that was, with another value, as `check_settings` does.
    """
    given = {name: getattr(model, name) for name in model.model_fields_set}
    _require_equal(found, given)
    own = {"block_size": min(_positions(found), _MOST_POSITIONS), "vocab_size": found.vocab_size}
    preset: Mapping[str, Any] = network.transformers()["presets"][found.model_type]
    try:
        adopted = ModelConfig(**{**preset, **own, **found.settings(), **given})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(f"config.json: {'.'.join(map(str, first['loc'])) or '[model]'}: {first['msg']}") from error
    check_settings(found, adopted)
    return adopted


def document_of(model: ModelConfig, *, ids: int, end_of_text_id: int, begun_from: str | None) -> dict[str, Any]:
    """Make the content of an export's `config.json`: that of the weights it was trained from, where there are such.

    Keys that are not part of [model] stay as they were there, as do positions without a table; Python files that
    `transformers` would run are not named. Raises InvalidInput as `config_of` does, and for another network's.
    """
    if model.module:  # not a network of the library: what its builder is called with
        ends = {"bos_token_id": end_of_text_id, "eos_token_id": end_of_text_id}
        return {**model.model_dump(mode="json"), "vocab_size": model.rows(ids), **ends}
    made = config_of(model, vocab_size=ids, end_of_text_id=end_of_text_id).model_dump(mode="json", exclude_none=True)
    if begun_from is None:
        return made
    check_settings(parse_config(begun_from.encode()), model)
    kept: dict[str, Any] = json.loads(begun_from)
    # Exactly the tensors that are written: rows, type and head, and of a table as many positions as were trained.
    ours = {"vocab_size", "architectures", "torch_dtype", *(("n_positions",) if model.positions == "learned" else ())}
    named = {name: value for name, value in kept.items() if name not in ("auto_map", "dtype", "n_ctx")}
    return named | {name: made[name] for name in ours}


def config_of(model: ModelConfig, *, vocab_size: int, end_of_text_id: int) -> HuggingFaceConfig:
    """Make the `config.json` of a network; raises InvalidInput where `transformers` has no such network."""
    family = require_family(model)
    names = network.transformers()["keys"]["gpt2" if family == "gpt2" else "llama"]
    values: dict[str, Any] = {theirs: getattr(model, ours) for theirs, ours in names.items()}
    values |= {"vocab_size": model.rows(vocab_size), "bos_token_id": end_of_text_id, "eos_token_id": end_of_text_id}
    if family == "gpt2":
        values |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
        values["n_inner"] = None if model.n_inner == 4 * model.n_embd else model.n_inner
        return Gpt2Config(**values, n_positions=model.block_size)
    # Rotations are written as `rope_theta`, which older readers know too.
    values |= {"architectures": (f"{family.capitalize()}ForCausalLM",), "attention_dropout": model.dropout}
    if model.rotary_scaling is not None:
        kind = "linear" if len(model.rotary_scaling) == 1 else "llama3"
        scaling = dict(zip(_SCALING_KEYS, model.rotary_scaling, strict=False))
        values["rope_scaling"] = RopeConfig.model_validate({"rope_type": kind, **scaling})
    return LlamaConfig(**values, model_type=family, max_position_embeddings=model.block_size)


def require_family(model: ModelConfig) -> Family:
    """Return the architecture of `transformers` that this network is; raises InvalidInput where there is none."""
    family = family_of(model)
    if family is None:
        preset = ModelConfig(architecture=model.architecture)
        other = [name for name in network.KINDS if getattr(model, name) != getattr(preset, name)]
        said = ", ".join(f"model.{name} = {_toml(getattr(model, name))}" for name in other)
        rule = "a gpt2, a qwen3 or a llama as their architectures are; weights of this run can be read with safetensors"
        raise InvalidInput(f"{said or 'its heads'}: transformers has no such network; rule: {rule}")
    return family


def check_settings(found: HuggingFaceConfig, model: ModelConfig) -> None:
    """Raise InvalidInput where `found` is another network, naming values for [model]; a smaller block_size will do."""
    if family_of(model) != found.model_type:
        problem = f"model_type = {found.model_type!r}, and [model] describes another network"
        preset = network.transformers()["presets"][found.model_type]
        same = " and ".join(f"model.{name} = {json.dumps(value)}" for name, value in preset.items())
        rule = f"the same architecture; leave [model] out, or use {same} without other keys of it"
        raise InvalidInput(f"config.json: {problem}; rule: {rule}")
    _require_equal(found, {name: getattr(model, name) for name in found.settings()})
    if model.block_size > (positions := _positions(found)):
        rule = f"rule: at most that; use model.block_size = {positions} or less"
        raise InvalidInput(f"model.block_size = {model.block_size}: the weights have {positions} positions; {rule}")


def _require_equal(found: HuggingFaceConfig, values: Mapping[str, Any]) -> None:
    settings = {"vocab_size": found.vocab_size, **found.settings()}
    wrong = [name for name in settings if name in values and values[name] != settings[name]]
    if wrong:
        has = ", ".join(f"model.{name} = {_toml(values[name])}" for name in wrong)
        wanted = ", ".join(f"model.{name} = {_toml(settings[name])}" for name in wrong if settings[name] is not None)
        use = f"use {wanted}" if wanted else "leave it out"
        raise InvalidInput(f"{has}: the weights are of another shape; rule: equal to config.json; {use}")


def _positions(found: HuggingFaceConfig) -> int:
    return found.n_positions if isinstance(found, Gpt2Config) else found.max_position_embeddings


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)


Arrays = Mapping[str, NDArray[Any]]

HEAD = "lm_head.weight"
_BUFFER = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)\Z")
"""Causal masks and frequencies in old files, which are ignored."""


def to_hugging_face(weights: Arrays, model: ModelConfig, vocab_size: int) -> dict[str, NDArray[Any]]:
    """Rename weights to those of `transformers`; a bias or gain that only it has gets its neutral value.

    Raises InvalidInput where it has no such network. A tied head is not written.
    """
    renamed: dict[str, NDArray[Any]] = {}
    dtype = next(iter(weights.values())).dtype
    complete = {"bias": require_family(model) == "gpt2", "norm_gain": True}  # as the network there always is
    for row in network.parameter_table(model.model_copy(update=complete), vocab_size):
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
    complete = {"bias": family == "gpt2", "norm_gain": True}  # as the network there always is
    table = network.parameter_table(model.model_copy(update=complete), vocab_size)
    if model.tied:
        head, (embedding,) = found.pop(HEAD, None), table[0].theirs
        if head is not None and embedding in found and not np.array_equal(head, found[embedding]):
            raise InvalidInput(f"{HEAD} differs from {embedding}; rule: the head is the token embedding, held once")
    wanted = {name for row in table for name in row.theirs}
    for word, names in (("missing", wanted - found.keys()), ("unexpected", found.keys() - wanted)):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise InvalidInput(f"{word} weights: {listed}; rule: exactly those of a {family} of [model]'s shape")
    own = {row.name for row in network.parameter_table(model, vocab_size)}
    converted = {row.name: _convert(row, found) for row in table}
    for row in table:
        if row.name not in own and np.any(converted[row.name] != row.constant):
            key = "bias" if row.kind == "bias" else "norm_gain"
            problem = f"{row.theirs[0]} of the weights is not {row.constant:g}"
            raise InvalidInput(f"model.{key} = false: {problem}; rule: use model.{key} = true")
    return {name: array for name, array in sorted(converted.items()) if name in own}


def _convert(row: network.Parameter, found: Arrays) -> NDArray[np.float32]:
    """Check the tensors that are joined in one of ours, and join them in float32."""
    parts = list[NDArray[np.float32]]()
    for name, rows in zip(row.theirs, row.rows if len(row.theirs) > 1 else (sum(row.rows),), strict=True):
        array, shape = found[name], (rows, *row.shape[1:])
        if row.kind == "positions":
            array = array[:rows]  # (positions, C) -> (block_size, C)
        ours = array.T if row.is_transposed else array  # (in, out) -> (out, in)
        if ours.shape != shape:
            expected = shape[::-1] if row.is_transposed else shape
            raise InvalidInput(f"{name} has shape {array.shape}; rule: {expected} by [model]")
        if not np.issubdtype(ours.dtype, np.floating):
            raise InvalidInput(f"{name} is {ours.dtype}; rule: floating point; quantized weights cannot be trained on")
        parts.append(np.ascontiguousarray(ours, dtype=np.float32))
        if not np.isfinite(parts[-1]).all():
            raise InvalidInput(f"{name} holds values that are not finite; rule: weights to begin from are finite")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
