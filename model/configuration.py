"""What a user may say about model, training and data, validated before any work.

Owns the rules between fields. Refuses to know torch: verbs that only read import this and must answer at once.
"""

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

UNFROZEN_TRAINING: frozenset[str] = frozenset(
    {
        "micro_batch",
        "device",
        "threads",
        "probe_every_steps",
        "probe_batches",
        "sample_tokens",
        "activation_checkpointing",
    }
)
"""Training fields that do not change which run it is; everything else in TrainingConfig is frozen at run-opened."""

SMALLEST_BPE_VOCABULARY = 257
"""Every byte and end-of-text: a byte-level vocabulary cannot be smaller."""

_LATER_DATA_KEYS = ("tokenizer_bytes", "max_document_bytes", "max_rejected_fraction", "deduplicate")

Precision = Literal["fp32", "bf16", "fp16"]

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
    micro_batch: Positive = Field(default_factory=lambda data: int(data.get("global_batch", 1)))
    lr: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-3
    min_lr: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1e-4
    warmup_steps: NotNegative = Field(default_factory=lambda data: min(2000, int(data.get("steps", 0)) // 10))
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.1
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.95)
    grad_clip: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    precision: Precision = "fp32"
    compile: bool = False
    mask_documents: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    activation_checkpointing: bool = False
    probe_every_steps: NotNegative = 100
    probe_batches: Positive = 4
    sample_tokens: NotNegative = 120
    threads: Positive | None = None

    @model_serializer(mode="wrap")
    def _without_masking_unless_wanted(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A run opened before there was the key is still the same run: what is not said is not written.
        document: dict[str, Any] = handler(self)
        return {name: value for name, value in document.items() if name != "mask_documents" or value}

    @field_validator("micro_batch", mode="before")
    @classmethod
    def _whole_batch_by_default(cls, value: Any, info: ValidationInfo) -> Any:
        return info.data.get("global_batch", 1) if value is None else value

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.micro_batch > self.global_batch:
            raise ValueError(f"micro_batch={self.micro_batch} must be at most global_batch={self.global_batch}")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be at most steps={self.steps}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} must be at most lr={self.lr}")
        return self


class DataConfig(BaseModel):
    """Which text a run learns from and how it becomes tokens.

    Sizes are in bytes: a longer document is left out, and the tokenizer learns from at most `tokenizer_bytes` of text.
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

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A run opened before these keys existed is still the same run: what is not said is not written.
        document: dict[str, Any] = handler(self)
        defaults = {name: type(self).model_fields[name].default for name in _LATER_DATA_KEYS}
        return {name: value for name, value in document.items() if name not in defaults or value != defaults[name]}

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

    @property
    def bpe_vocab_size(self) -> int | None:
        """Vocabulary size asked for with `bpe:<size>`, in tokens; None for bytes or a tokenizer file."""
        kind, _, size = self.tokenizer.partition(":")
        return int(size) if kind == "bpe" and size.isdigit() else None
