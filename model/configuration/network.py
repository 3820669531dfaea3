"""The section `[model]`: one description of a network, in which an architecture's name only sets the defaults.

Sources: `gpt2` is Radford et al. 2019; `qwen3` is Yang et al. 2025, "Qwen3 Technical Report", and without `qk_norm` it
is Touvron et al. 2023, "LLaMA"; squared ReLU is So et al. 2021, "Primer".
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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


def _preset(name: str) -> Any:
    """Make a field whose default is the architecture's."""

    def default(data: Mapping[str, Any]) -> Any:
        return _PRESETS[data.get("architecture", "gpt2")][name]

    values = {kind: preset[name] for kind, preset in _PRESETS.items()}
    words = {kind: str(value).lower() if isinstance(value, bool) else value for kind, value in values.items()}
    rule = ", ".join(f"{kind}: {word}" for kind, word in words.items())
    return Field(default_factory=default, json_schema_extra={"default_rule": rule})


def _derived(default: Callable[[Mapping[str, Any]], int], rule: str) -> Any:
    """Make a field whose default is computed from those before it; 1 where one of these was refused."""

    def computed(data: Mapping[str, Any]) -> int:
        try:
            return max(1, default(data))
        except KeyError:
            return 1

    return Field(default_factory=computed, json_schema_extra={"default_rule": rule})


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
    """how a token's place is told: a learned table, or queries and keys rotated by it"""
    rotary_base: PositiveNumber = 1e6
    """base of the rotations' wavelengths; with rotary positions"""
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
    zero_projections: bool = False
    """projections back into the residual stream begin as zeros instead of small random numbers"""

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        if "head_size" not in self.model_fields_set and self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} must be divisible by n_head={self.n_head}; or set head_size")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} must be divisible by n_kv_head={self.n_kv_head}")
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(f"head_size={self.head_size} must be even, because rotary positions turn pairs of numbers")
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
    def has_gpt2_layers(self) -> bool:
        """Whether a layer computes what GPT-2's does."""
        wanted = {name: value for name, value in _PRESETS["gpt2"].items() if name not in ("bias", "norm_epsilon")}
        plain = self.n_kv_head == self.n_head and self.attention_width == self.n_embd and self.norm_gain
        return plain and not self.ngram_rows and all(getattr(self, name) == value for name, value in wanted.items())
