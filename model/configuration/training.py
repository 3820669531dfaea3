"""How a user wants a network trained: sizes in samples and steps, rates per step."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from model.configuration.network import NotNegative, Positive

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

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Kernels = Literal["auto", "stock", "fused"]
Parallel = Literal["ddp", "fsdp"]


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
