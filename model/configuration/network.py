"""The shape of the network a user asks for."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
