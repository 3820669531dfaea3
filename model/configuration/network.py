"""The section `[model]`, in which an architecture's name only sets the defaults, and the table of its parameters.

Counts, decay groups, FLOPs, memory, initial weights, export and import follow from the table. Imports no torch.
Sources: `gpt2` is Radford et al. 2019; `qwen3` is Yang et al. 2025, "Qwen3 Technical Report", and without `qk_norm` it
is Touvron et al. 2023, "LLaMA"; squared ReLU is So et al. 2021, "Primer"; transformers, models/gpt2, models/llama and
models/qwen3.
"""

import math
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from cairn.model.errors import InvalidInput

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
NotNegativeNumber = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
PositiveNumber = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Architecture = Literal["gpt2", "qwen3"]
FeedForwardKind = Literal["gelu", "relu2", "swiglu"]
INNER_WIDTHS: Mapping[str, int] = {"gelu": 4, "relu2": 4, "swiglu": 3}
"""How many times the width a feed-forward layer has inside; of a gated one each of both halves."""
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": dict(norm="layer", norm_epsilon=1e-5, positions="learned", feed_forward="gelu", qk_norm=False, bias=True),
    "qwen3": dict(norm="rms", norm_epsilon=1e-6, positions="rotary", feed_forward="swiglu", qk_norm=True, bias=False),
}


class Section(BaseModel):
    """Base of all sections: immutable, an unknown key is an error, and what a key means stands below it."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def ruled(default: Any, rule: str) -> Any:
    """Make a field whose rule is said in words."""
    return Field(default, json_schema_extra={"rule": rule})


def computed(default: Callable[[Mapping[str, Any]], Any], rule: str) -> Any:
    """Make a field whose default is computed from those before it, which is said in words."""
    return Field(default_factory=default, json_schema_extra={"default_rule": rule})


def _preset(name: str) -> Any:
    """Make a field whose default is the architecture's."""

    def default(data: Mapping[str, Any]) -> Any:
        return _PRESETS[data.get("architecture", "gpt2")][name]

    values = {kind: preset[name] for kind, preset in _PRESETS.items()}
    words = {kind: str(value).lower() if isinstance(value, bool) else value for kind, value in values.items()}
    rule = ", ".join(f"{kind}: {word}" for kind, word in words.items())
    return computed(default, rule)


def _derived(default: Callable[[Mapping[str, Any]], int], rule: str) -> Any:
    """Make a field whose default is computed from those before it; 1 where one of these was refused."""

    def derive(data: Mapping[str, Any]) -> int:
        try:
            return max(1, default(data))
        except KeyError:
            return 1

    return computed(derive, rule)


Digest = Annotated[
    str, Field(pattern=r"^[0-9a-f]{64}$", json_schema_extra={"rule": "a sha256 of 64 hexadecimal digits"})
]
PYTHON_FILE = r"^[A-Za-z_][A-Za-z0-9_]*\.py$"
FileName = Annotated[str, Field(pattern=PYTHON_FILE)]
OF_MODULE = ("module", "block_size", "imports", "files")
"""The keys of `[model]` for a network of one's own; each other one there is an argument of it."""
FILLED_IN = ("vocab_size", "block_size")
"""Arguments of a module that the run knows itself."""
KNOWN_PACKAGES = frozenset({"torch", "numpy", *sys.stdlib_module_names})
"""Packages that a module's files may import without being asked."""
RUN_AS = "_cairn_own_"
"""Begins the names of a module's files in tracebacks."""
_ONLY_OF_MODULE = ("module", "imports", "files", "arguments")


class ModelConfig(Section, use_attribute_docstrings=True):
    """Shape of the network."""

    architecture: Architecture = "gpt2"
    """whose values the other keys have by default; each may be set on its own"""
    n_layer: Positive = 4
    """number of transformer layers"""
    n_head: Positive = 4
    """number of attention heads in a layer"""
    n_embd: Positive = 128
    """embedding width of a token"""
    block_size: Positive = Field(128, json_schema_extra={"unit": "tokens"})
    """context length: how far a token can look back"""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """share of activations that training sets to zero"""
    n_kv_head: Positive = _derived(lambda data: data["n_head"], "n_head")
    """number of heads with keys and values, shared by equal groups of heads"""
    head_size: Positive = _derived(lambda data: data["n_embd"] // data["n_head"], "n_embd / n_head")
    """width of an attention head"""
    norm: Literal["layer", "rms"] = _preset("norm")
    """normalisation before each part of a layer: LayerNorm or RMSNorm"""
    norm_gain: bool = True
    """norms have a learned factor for each number"""
    norm_epsilon: PositiveNumber = _preset("norm_epsilon")
    """what norms add to the variance"""
    qk_norm: bool = _preset("qk_norm")
    """queries and keys are normalised by RMSNorm, each head on its own"""
    positions: Literal["learned", "rotary"] = _preset("positions")
    """how a token's place is encoded: a learned table, or queries and keys rotated by it"""
    rotary_base: PositiveNumber = 1e6
    """base of the rotations' wavelengths; with rotary positions"""
    rotary_scaling: Annotated[tuple[PositiveNumber, ...], Field(min_length=1)] | None = ruled(
        None, "a list of one or four numbers above 0"
    )
    """factor that stretches the wavelengths; or Llama 3's: factor, low and high frequency factor, original positions"""
    feed_forward: FeedForwardKind = _preset("feed_forward")
    """function inside the feed-forward part; swiglu is gated"""
    n_inner: Positive = _derived(
        lambda data: INNER_WIDTHS[data["feed_forward"]] * data["n_embd"], "4 n_embd, with swiglu 3 n_embd"
    )
    """width inside the feed-forward part"""
    bias: bool = _preset("bias")
    """linear layers and layer norms have a bias"""
    ngram_rows: tuple[Positive, ...] = ()
    """rows of tables that add a vector for the last two tokens, the last three, and so on"""
    tied: bool = True
    """the head is the token embedding"""
    vocab_size: Positive | None = None
    """rows of the token embedding, more than the tokenizer's ids where weights were padded; not set: as many as ids"""
    zero_projections: bool = False
    """projections back into the residual stream begin as zeros instead of small random numbers"""
    module: str | None = ruled(None, "a file and a name in it, such as my_net.py:build")
    """function or class that makes a network of your own; what it is called with are further keys of [model]"""
    imports: tuple[str, ...] = ()
    """packages that the module's files import besides torch, numpy and the standard library"""
    files: dict[FileName, Digest] | None = Field(None, json_schema_extra={"internal": True})
    """sha256 of the module's file, and of those beside it that it imports"""
    arguments: dict[str, Any] | None = Field(None, json_schema_extra={"internal": True})
    """what the module is called with"""

    @model_validator(mode="before")
    @classmethod
    def _gather_arguments(cls, document: Any) -> Any:
        if not isinstance(document, Mapping) or not document.get("module") or "arguments" in document:
            return document
        own = {name: value for name, value in document.items() if name in OF_MODULE}
        return {**own, "arguments": {name: value for name, value in document.items() if name not in OF_MODULE}}

    @model_serializer(mode="wrap")
    def _as_written(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what does not count: of a module the keys of other networks, of those the module's."""
        document: dict[str, Any] = serialize(self)
        if self.module:
            return {name: document[name] for name in OF_MODULE} | (self.arguments or {})
        return {name: document[name] for name in document if name not in _ONLY_OF_MODULE}

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        if self.files is not None and (self.module or "").rpartition(":")[0] not in self.files:
            raise ValueError(f"files={sorted(self.files)} do not have that of module={self.module!r}; leave files out")
        if self.imports and not self.module:
            raise ValueError(f"imports={list(self.imports)} are those of a module's files; set module, or leave it out")
        if "head_size" not in self.model_fields_set and self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} must be divisible by n_head={self.n_head}; or set head_size")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} must be divisible by n_kv_head={self.n_kv_head}")
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(f"head_size={self.head_size} must be even, because rotary positions turn pairs of numbers")
        factor, *llama = self.rotary_scaling or (1.0,)
        if llama and not (len(llama) == 3 and llama[0] < llama[1] and llama[2] % 1 == 0):
            rule = "must be one number, or Llama 3's four: the second is below the third, the last whole"
            raise ValueError(f"rotary_scaling={[factor, *llama]} {rule}")
        return self

    @property
    def attention_width(self) -> int:
        """Width of all heads' queries, and of what attention returns before its projection."""
        return self.n_head * self.head_size

    @property
    def key_width(self) -> int:
        """Width of all keys, and of all values."""
        return self.n_kv_head * self.head_size

    @property
    def draws_numbers(self) -> bool:
        """Whether a step may draw random numbers, as dropout does."""
        return bool(self.dropout or self.module)

    def rows(self, ids: int) -> int:
        """Return the rows of the embedding for a tokenizer of so many ids; raises InvalidInput for fewer rows."""
        if (rows := (self.arguments or {}).get("vocab_size", self.vocab_size) or ids) < ids:
            raise InvalidInput(f"model.vocab_size = {rows}: the tokenizer has {ids} ids; rule: a row for each of them")
        return rows


Kind = Literal["embedding", "positions", "ngrams", "head", "matrix", "gain", "bias"]
INITIAL_STD = 0.02
WIDENED = {"gelu": 1, "relu2": 1, "swiglu": 2}
"""How many matrices widen in a feed-forward part: a gated one has two."""


@cache
def transformers() -> Mapping[str, Any]:
    """Return networks in the words of that library."""
    return tomllib.loads(Path(__file__).with_name("transformers.toml").read_text(encoding="utf-8"))


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


KINDS = ("norm", "norm_gain", "positions", "feed_forward", "bias", "tied", "qk_norm", "ngram_rows")
"""The keys that say which architecture a network is; all others are its sizes."""


def family_of(model: ModelConfig) -> Family | None:
    """Return the architecture of `transformers` that computes what this network does, None if there is none."""
    is_plain = model.n_kv_head == model.n_head and model.attention_width == model.n_embd
    presets: Mapping[Family, Mapping[str, Any]] = {} if model.module else transformers()["presets"]
    for family, preset in presets.items():
        theirs, free = ModelConfig(**preset), transformers()["free"][family]
        is_same = all(getattr(model, name) == getattr(theirs, name) for name in KINDS if name not in free)
        if is_same and (is_plain or family != "gpt2"):
            return family
    return None


@cache
def parameter_table(model: ModelConfig, vocab_size: int) -> tuple[Parameter, ...]:
    """Return the parameters in the network's order, for so many ids; only who makes a module knows its own."""
    if model.module:
        raise InvalidInput(f"model.module = {model.module!r}: its parameters are known where it is made")
    family, table = family_of(model), list[Parameter]()
    for name, kind, rows, columns in _parts(model, vocab_size):
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
            theirs = tuple(f"{prefix}{part}.{leaf}" for part in transformers()["modules"][module])
        shape, constant = (sum(rows), columns) if columns else (sum(rows),), 1.0 if kind == "gain" else 0.0
        turns = family == "gpt2" and kind == "matrix"
        row = Parameter(
            name=name, shape=shape, kind=kind, rows=rows, std=std, constant=constant, theirs=theirs, is_transposed=turns
        )
        table.append(row)
    return tuple(table)


def layer_matrices(model: ModelConfig) -> int:
    """Return how many numbers the matrices of one layer hold."""
    attention = model.n_embd * (2 * model.attention_width + 2 * model.key_width)
    return attention + model.n_embd * model.n_inner * (1 + WIDENED[model.feed_forward])


_Row = tuple[str, Kind, tuple[int, ...], int | None]


def _parts(model: ModelConfig, vocab_size: int) -> Iterator[_Row]:
    """Yield name, kind, rows and columns of each parameter; None for a vector."""
    width, vocabulary = model.n_embd, model.rows(vocab_size)
    yield "wte.weight", "embedding", (vocabulary,), width
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
        yield "lm_head.weight", "head", (vocabulary,), width


def _linear_parts(model: ModelConfig, name: str, rows: tuple[int, ...], columns: int) -> Iterator[_Row]:
    yield f"{name}.weight", "matrix", rows, columns
    if model.bias:
        yield f"{name}.bias", "bias", rows, None


def _norm_parts(model: ModelConfig, name: str, width: int) -> Iterator[_Row]:
    if model.norm_gain:
        yield f"{name}.weight", "gain", (width,), None
        if model.norm == "layer" and model.bias:
            yield f"{name}.bias", "bias", (width,), None
