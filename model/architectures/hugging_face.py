"""Converts GPT-2 weights and settings to and from the layout of `transformers`. Works on arrays; imports no torch.

Source: transformers, models/gpt2/configuration_gpt2.py and modeling_gpt2.py (its Conv1D stores weights as (in, out), a
Linear as (out, in); biases are always present; the head is the token embedding).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from model.configuration.network import ModelConfig
from model.errors import InvalidInput

Arrays = Mapping[str, NDArray[Any]]

PREFIX = "transformer."
HEAD = "lm_head.weight"
_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias\Z")
"""The causal mask in old files, which is ignored."""
_TRANSPOSED = re.compile(r"(c_attn|c_proj|c_fc)\.weight\Z")
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


class HuggingFaceConfig(BaseModel):
    """A `config.json` of the GPT-2 family; missing keys have the library's defaults, unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

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
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    torch_dtype: str | None = "float32"

    @classmethod
    def from_model(cls, model: ModelConfig, *, vocab_size: int, end_of_text_id: int) -> Self:
        """Make the `config.json` of a network of this shape."""
        return cls(
            vocab_size=vocab_size,
            n_positions=model.block_size,
            n_embd=model.n_embd,
            n_layer=model.n_layer,
            n_head=model.n_head,
            resid_pdrop=model.dropout,
            embd_pdrop=model.dropout,
            attn_pdrop=model.dropout,
            bos_token_id=end_of_text_id,
            eos_token_id=end_of_text_id,
        )


def check_settings(found: HuggingFaceConfig, model: ModelConfig) -> None:
    """Raise InvalidInput where `found` is another network, naming values for [model]; a smaller block_size will do."""
    wrong = [name for name in ("n_layer", "n_head", "n_embd") if getattr(found, name) != getattr(model, name)]
    if wrong:
        has = ", ".join(f"model.{name} = {getattr(model, name)}" for name in wrong)
        wanted = ", ".join(f"model.{name} = {getattr(found, name)}" for name in wrong)
        raise InvalidInput(f"{has}: the weights are of another shape; rule: equal to config.json; use {wanted}")
    if model.block_size > found.n_positions:
        raise InvalidInput(
            f"model.block_size = {model.block_size}: the weights have {found.n_positions} positions; rule: at most "
            f"that; use model.block_size = {found.n_positions} or less"
        )
    rules = (
        ("activation_function", found.activation_function in _TANH_GELU, f"one of {', '.join(_TANH_GELU)}"),
        ("n_inner", found.n_inner in (None, 4 * found.n_embd), f"null or {4 * found.n_embd}, four times n_embd"),
        ("layer_norm_epsilon", found.layer_norm_epsilon == 1e-5, "1e-05"),
        ("scale_attn_weights", found.scale_attn_weights, "true"),
        ("scale_attn_by_inverse_layer_idx", not found.scale_attn_by_inverse_layer_idx, "false"),
        ("add_cross_attention", not found.add_cross_attention, "false"),
        ("tie_word_embeddings", found.tie_word_embeddings, "true"),
    )
    for name, holds, rule in rules:
        if not holds:
            value = getattr(found, name)
            raise InvalidInput(f"config.json: {name} = {value!r}; rule: {rule}; no other GPT-2 is trained here")


def to_hugging_face(weights: Arrays) -> dict[str, NDArray[Any]]:
    """Rename weights to those of `transformers`; a missing bias becomes zero, and the tied head is not written."""
    renamed: dict[str, NDArray[Any]] = {}
    for name, array in weights.items():
        converted = _transpose(name, array)
        renamed[f"{PREFIX}{name}"] = converted
        bias = f"{name.removesuffix('weight')}bias"
        if bias not in weights and not name.startswith(("wte.", "wpe.")) and name.endswith(".weight"):
            renamed[f"{PREFIX}{bias}"] = np.zeros(converted.shape[-1], dtype=array.dtype)
    return renamed


def from_hugging_face(tensors: Arrays, model: ModelConfig, vocab_size: int) -> dict[str, NDArray[np.float32]]:
    """Rename weights of `transformers`, with or without their prefix, to this network's, in float32.

    Causal masks and a head equal to the embedding are ignored. Raises InvalidInput naming tensors that are missing,
    unexpected, of another shape, not finite, or a nonzero bias where `model.bias` is false.
    """
    found = {name.removeprefix(PREFIX): array for name, array in tensors.items()}
    found = {name: array for name, array in found.items() if not _BUFFER.search(name)}
    head = found.pop(HEAD, None)
    if head is not None and "wte.weight" in found and not np.array_equal(head, found["wte.weight"]):
        raise InvalidInput(f"{HEAD} differs from wte.weight; rule: the head is the token embedding, held once")
    shapes = dict(_shapes(model, vocab_size))
    for word, names in (("missing", shapes.keys() - found.keys()), ("unexpected", found.keys() - shapes.keys())):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise InvalidInput(f"{word} weights: {listed}; rule: exactly those of a GPT-2 of [model]'s shape")
    converted = {}
    for name, shape in sorted(shapes.items()):
        if model.bias or not name.endswith(".bias"):
            converted[name] = _convert(name, found[name], shape)
        elif np.any(found[name]):
            raise InvalidInput(f"model.bias = false: {name} of the weights is not zero; rule: use model.bias = true")
    return converted


def _shapes(model: ModelConfig, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every weight of this network."""
    width = model.n_embd
    yield "wte.weight", (vocab_size, width)
    yield "wpe.weight", (model.block_size, width)
    linear = {
        "attn.c_attn": (3 * width, width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (4 * width, width),
        "mlp.c_proj": (width, 4 * width),
        "ln_1": (width,),
        "ln_2": (width,),
    }
    layers = [(f"h.{layer}.{name}", shape) for layer in range(model.n_layer) for name, shape in linear.items()]
    for name, shape in [*layers, ("ln_f", (width,))]:
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]


def _transpose(name: str, array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array.T) if _TRANSPOSED.search(name) else array  # (out, in) <-> (in, out)


def _convert(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.float32]:
    if name == "wpe.weight":
        array = array[: shape[0]]  # (positions, C) -> (block_size, C)
    ours = _transpose(name, array)
    if ours.shape != shape:
        expected = shape[::-1] if _TRANSPOSED.search(name) else shape
        raise InvalidInput(f"{name} has shape {array.shape}; rule: {expected} by [model]")
    if not np.issubdtype(ours.dtype, np.floating):
        raise InvalidInput(f"{name} is {ours.dtype}; rule: floating point; quantized weights cannot be trained on")
    converted = np.ascontiguousarray(ours, dtype=np.float32)
    if not np.isfinite(converted).all():
        raise InvalidInput(f"{name} holds values that are not finite; rule: weights to begin from are finite")
    return converted
