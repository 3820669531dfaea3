"""The table of a network's parameters: of each its name, shape, kind, first values and names in `transformers`.

Counts, decay groups, FLOPs, memory, initial weights, export and import follow from it. Imports no torch.
Sources: Radford et al. 2019 (initial values); transformers, models/gpt2, models/llama and models/qwen3.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from cairn.model.configuration.network import ModelConfig

Kind = Literal["embedding", "positions", "ngrams", "head", "matrix", "gain", "bias"]
INITIAL_STD = 0.02
WIDENED = {"gelu": 1, "relu2": 1, "swiglu": 2}
"""How many matrices widen in a feed-forward part: a gated one has two."""
_LLAMA_NAMES = {
    "wte": ("model.embed_tokens",),
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.c_proj": ("self_attn.o_proj",),
    "ln_2": ("post_attention_layernorm",),
    "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.c_proj": ("mlp.down_proj",),
    "ln_f": ("model.norm",),
    "lm_head": ("lm_head",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A tensor of the network: `rows` are those of the separate matrices that were joined in it for one product.

    First values are normal with deviation `std`, or all `constant` where it is 0. `theirs` has a name of
    `transformers` for each of `rows` or one for all, or is empty where it knows no such network.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    rows: tuple[int, ...]
    std: float
    constant: float
    theirs: tuple[str, ...]
    is_transposed: bool
    """Whether `transformers` keeps it as (in, out), as GPT-2's matrices."""

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices and tables, not to gains and biases."""
        return len(self.shape) > 1


Family = Literal["gpt2", "llama", "qwen3"]


def family_of(model: ModelConfig) -> Family | None:
    """Return the architecture of `transformers` that computes what this network does, None if there is none."""
    if model.has_gpt2_layers:
        return "gpt2" if model.tied else None
    llama = model.norm == "rms" and model.positions == "rotary" and model.feed_forward == "swiglu"
    if not llama or model.bias or model.ngram_rows:
        return None
    return "qwen3" if model.qk_norm else "llama"


@cache
def parameter_table(model: ModelConfig, vocab_size: int) -> tuple[Parameter, ...]:
    """Return the parameters in the network's order."""
    family = family_of(model)
    return tuple(_row(model, family, *row) for row in _parts(model, vocab_size))


def layer_matrices(model: ModelConfig) -> int:
    """Return how many numbers the matrices of one layer hold."""
    attention = model.n_embd * (2 * model.attention_width + 2 * model.key_width)
    return attention + model.n_embd * model.n_inner * (1 + WIDENED[model.feed_forward])


_Row = tuple[str, Kind, tuple[int, ...], int | None]


def _parts(model: ModelConfig, vocab_size: int) -> Iterator[_Row]:
    """Yield name, kind, rows and columns of each parameter; None for a vector."""
    width = model.n_embd
    yield "wte.weight", "embedding", (vocab_size,), width
    if model.positions == "learned":
        yield "wpe.weight", "positions", (model.block_size,), width
    for number, rows in enumerate(model.ngram_rows):
        yield f"ngrams.{number}.weight", "ngrams", (rows,), width
    keys, widened = model.key_width, (model.n_inner,) * WIDENED[model.feed_forward]
    for layer in (f"h.{number}" for number in range(model.n_layer)):
        yield from _norm_parts(model, f"{layer}.ln_1", width)
        yield from _linear_parts(model, f"{layer}.attn.c_attn", (model.attention_width, keys, keys), width)
        yield from _linear_parts(model, f"{layer}.attn.c_proj", (width,), model.attention_width)
        if model.qk_norm and model.norm_gain:
            yield f"{layer}.attn.q_norm.weight", "gain", (model.head_size,), None
            yield f"{layer}.attn.k_norm.weight", "gain", (model.head_size,), None
        yield from _norm_parts(model, f"{layer}.ln_2", width)
        yield from _linear_parts(model, f"{layer}.mlp.c_fc", widened, width)
        yield from _linear_parts(model, f"{layer}.mlp.c_proj", (width,), model.n_inner)
    yield from _norm_parts(model, "ln_f", width)
    if not model.tied:
        yield "lm_head.weight", "head", (vocab_size,), width


def _linear_parts(model: ModelConfig, name: str, rows: tuple[int, ...], columns: int) -> Iterator[_Row]:
    yield f"{name}.weight", "matrix", rows, columns
    if model.bias:
        yield f"{name}.bias", "bias", rows, None


def _norm_parts(model: ModelConfig, name: str, width: int) -> Iterator[_Row]:
    if model.norm_gain:
        yield f"{name}.weight", "gain", (width,), None
        if model.norm == "layer" and model.bias:
            yield f"{name}.bias", "bias", (width,), None


def _row(
    model: ModelConfig, family: Family | None, name: str, kind: Kind, rows: tuple[int, ...], columns: int | None
) -> Parameter:
    std = INITIAL_STD if columns else 0.0
    if name.endswith("c_proj.weight"):
        std = 0.0 if model.zero_projections else INITIAL_STD / math.sqrt(2 * model.n_layer)
    theirs: tuple[str, ...] = (f"transformer.{name}",) if family == "gpt2" else ()
    if family in ("llama", "qwen3"):
        module, _, leaf = name.rpartition(".")
        prefix = ""
        if module.startswith("h."):
            _, layer, module = module.split(".", 2)
            prefix = f"model.layers.{layer}."
        theirs = tuple(f"{prefix}{part}.{leaf}" for part in _LLAMA_NAMES[module])
    return Parameter(
        name=name,
        shape=(sum(rows), columns) if columns else (sum(rows),),
        kind=kind,
        rows=rows,
        std=std,
        constant=1.0 if kind == "gain" else 0.0,
        theirs=theirs,
        is_transposed=family == "gpt2" and kind == "matrix",
    )
