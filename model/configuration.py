"""What a user may say about model, training and data, validated before any work.

Owns the rules between fields. Refuses to know torch: verbs that only read import this and must answer at once.
"""

import posixpath
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from model.errors import InvalidInput

UNFROZEN_TRAINING: frozenset[str] = frozenset(
    {
        "micro_batch",
        "device",
        "threads",
        "probe_every_steps",
        "probe_batches",
        "sample_tokens",
        "activation_checkpointing",
        "processes",
        "parallel",
        "memory_check",
    }
)
"""Training fields that do not change which run it is; everything else in TrainingConfig is frozen at run-opened."""

SMALLEST_BPE_VOCABULARY = 257
"""Every byte and end-of-text: a byte-level vocabulary cannot be smaller."""

SNAPSHOT_SOURCE = "snapshot:"
SHORTEST_SNAPSHOT_ID = 8

_LATER_DATA_KEYS = ("tokenizer_bytes", "max_document_bytes", "max_rejected_fraction", "deduplicate", "weights")
_LATER_TRAINING_KEYS = ("mask_documents", "init_from", "processes", "parallel", "memory_check")

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Kernels = Literal["auto", "stock", "fused"]
Parallel = Literal["ddp", "fsdp"]

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


class ModelConfig(BaseModel):
    """Shape of a GPT-2."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_layer: Positive = 4
    n_head: Positive = 4
    n_embd: Positive = 128
    block_size: Positive = 128
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    bias: bool = True

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} must be divisible by n_head={self.n_head}")
        return self


class TrainingConfig(BaseModel):
    """How a model is trained: sizes in samples and steps, rates per step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Positive
    global_batch: Positive = 32
    micro_batch: Positive | Literal["auto"] = Field(default_factory=lambda data: int(data.get("global_batch", 1)))
    lr: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-3
    min_lr: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1e-4
    warmup_steps: NotNegative = Field(default_factory=lambda data: min(2000, int(data.get("steps", 0)) // 10))
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.1
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.95)
    grad_clip: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    precision: Precision = "auto"
    compile: bool = False
    kernels: Kernels = "auto"
    mask_documents: bool = False
    init_from: Annotated[str, Field(min_length=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    activation_checkpointing: bool = False
    probe_every_steps: NotNegative = 100
    probe_batches: Positive = 4
    sample_tokens: NotNegative = 120
    threads: Positive | None = None
    processes: Positive | Literal["auto"] = 1
    parallel: Parallel = "ddp"
    memory_check: bool = True

    @model_serializer(mode="wrap")
    def _without_later_keys_unless_wanted(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A run opened before there were these keys is still the same run: what is not said is not written.
        document: dict[str, Any] = handler(self)
        unsaid = {name for name in _LATER_TRAINING_KEYS if getattr(self, name) == type(self).model_fields[name].default}
        return {name: value for name, value in document.items() if name not in unsaid}

    @field_validator("micro_batch", mode="before")
    @classmethod
    def _whole_batch_by_default(cls, value: Any, info: ValidationInfo) -> Any:
        return info.data.get("global_batch", 1) if value is None else value

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.micro_batch != "auto" and self.micro_batch > self.global_batch:
            raise ValueError(f"micro_batch={self.micro_batch} must be at most global_batch={self.global_batch}")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be at most steps={self.steps}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} must be at most lr={self.lr}")
        return self

    @model_validator(mode="after")
    def _kernels_fit(self) -> Self:
        # The head's gradient is made before the scaler's factor is known.
        if self.kernels == "fused" and self.precision == "fp16":
            raise ValueError("kernels='fused' cannot be combined with precision='fp16': use kernels='stock', or bf16")
        return self


class DataConfig(BaseModel):
    """Which text a run learns from and how it becomes tokens.

    Sizes are in bytes: a longer document is left out, and the tokenizer learns from at most `tokenizer_bytes` of text.
    With `weights`, one for each of the `sources`, windows are drawn from them in this proportion, each source shuffled
    by itself; without, from all text alike. `snapshot:<id>` as the only source is a data snapshot of the store.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sources: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    # What the JSON reader cannot look for: quotes, backslashes and control characters.
    text_field: Annotated[str, Field(pattern=r'^[^"\\\x00-\x1f]+$')] = "text"
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    tokenizer: str = "bpe:1024"
    tokenizer_bytes: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024
    max_document_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024
    max_rejected_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    deduplicate: bool = False
    weights: tuple[Annotated[float, Field(gt=0.0, allow_inf_nan=False)], ...] = ()

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A run opened before these keys existed is still the same run: what is not said is not written.
        document: dict[str, Any] = handler(self)
        unsaid = {name for name in _LATER_DATA_KEYS if getattr(self, name) == type(self).model_fields[name].default}
        return {name: value for name, value in document.items() if name not in unsaid}

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_is_known(cls, value: str) -> str:
        kind, _, size = value.partition(":")
        if value == "bytes" or value.endswith(".json"):
            return value
        if kind != "bpe":
            raise ValueError(f"tokenizer={value!r} must be 'bytes', 'bpe:<size>' or the path of a tokenizer.json")
        if not (size.isascii() and size.isdigit() and int(size) >= SMALLEST_BPE_VOCABULARY):
            raise ValueError(
                f"tokenizer={value!r}: the size after 'bpe:' must be an integer of at least {SMALLEST_BPE_VOCABULARY} "
                "(256 bytes and end-of-text)"
            )
        return value

    @model_validator(mode="after")
    def _weights_fit_sources(self) -> Self:
        if not self.weights:
            return self
        if len(self.weights) != len(self.sources):
            raise ValueError(f"weights: {len(self.weights)} of them must be as many as the {len(self.sources)} sources")
        twice = sorted({name for name in self.source_names if self.source_names.count(name) > 1})
        if twice:
            raise ValueError(f"sources name {twice[0]!r} twice: with weights each has one of its own")
        _require_schedule(self.weights)
        return self

    @model_validator(mode="after")
    def _snapshot_stands_alone(self) -> Self:
        named = [source for source in self.sources if source.startswith(SNAPSHOT_SOURCE)]
        if not named:
            return self
        if len(self.sources) > 1:
            raise ValueError(f"sources: {named[0]!r} must be the only one; a snapshot cannot be mixed with others")
        _require_snapshot_id(named[0].removeprefix(SNAPSHOT_SOURCE))
        said = [
            name
            for name, field in type(self).model_fields.items()
            if name != "sources" and getattr(self, name) != field.default
        ]
        if said:
            raise ValueError(
                f"{', '.join(said)}: decided by {named[0]!r} already, which was made with its own; leave them out"
            )
        return self

    @property
    def snapshot(self) -> str | None:
        """The id, or the beginning of one, of the snapshot that is the source; None where the source is text."""
        source = self.sources[0]
        return source.removeprefix(SNAPSHOT_SOURCE) if source.startswith(SNAPSHOT_SOURCE) else None

    @property
    def source_names(self) -> tuple[str, ...]:
        """A name for each source that says nothing of where the text lies: paths from the folder they all share.

        URLs and built-in sources stay as they are, and so do paths where some are absolute and others are not.
        """
        paths = [posixpath.normpath(source) for source in self.sources if _is_path(source)]
        root = _shared_folder(paths)
        names = (posixpath.normpath(source)[len(root) :] if _is_path(source) else source for source in self.sources)
        return tuple(names)

    @property
    def bpe_vocab_size(self) -> int | None:
        """Vocabulary size asked for with `bpe:<size>`, in tokens; None for bytes or a tokenizer file."""
        kind, _, size = self.tokenizer.partition(":")
        return int(size) if kind == "bpe" and size.isdigit() else None


def _require_schedule(weights: Sequence[float]) -> None:
    from model.source_mixture import Mixture  # NumPy is not for who only reads a configuration without weights

    try:
        Mixture(weights=tuple(weights))
    except InvalidInput as error:
        raise ValueError(str(error)) from error


def _require_snapshot_id(beginning: str) -> None:
    if not (SHORTEST_SNAPSHOT_ID <= len(beginning) <= 64 and set(beginning) <= set("0123456789abcdef")):
        raise ValueError(
            f"sources: {SNAPSHOT_SOURCE}{beginning} must name a snapshot's id or at least its first "
            f"{SHORTEST_SNAPSHOT_ID} characters, as `cairn data` and `cairn import-tokens` print it"
        )


def _is_path(source: str) -> bool:
    return "://" not in source and not source.startswith("python:")


def _shared_folder(paths: Sequence[str]) -> str:
    if len({posixpath.isabs(path) for path in paths}) != 1:
        return ""
    folder = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    return f"{folder.rstrip('/')}/" if folder else ""
