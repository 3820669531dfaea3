"""Weights of networks that `transformers` knows, GPT-2, Llama and Qwen3, to and from its names.

Imports no torch. Source: transformers, models/gpt2 (Conv1D stores weights as (in, out), a Linear as (out, in); biases
are always there; the head is the token embedding), models/llama and models/qwen3 (one Linear for each matrix).
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.model.architectures.published_config import require_family
from cairn.model.configuration.network import ModelConfig, Parameter, parameter_table
from cairn.model.errors import InvalidInput

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
    converted = {row.name: _convert(row, found) for row in table}
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


def _convert(row: Parameter, found: Arrays) -> NDArray[np.float32]:
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
