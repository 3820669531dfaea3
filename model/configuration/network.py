"""The section `[model]`: the shape of the network."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
NotNegativeNumber = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
PositiveNumber = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Section):
    """Shape of a GPT-2."""

    n_layer: Positive = Field(4, description="number of transformer layers")
    n_head: Positive = Field(4, description="number of attention heads in a layer; must divide n_embd")
    n_embd: Positive = Field(128, description="embedding width of a token")
    block_size: Positive = Field(
        128, description="context length: how far a token can look back", json_schema_extra={"unit": "tokens"}
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="share of activations that training sets to zero"
    )
    bias: bool = Field(True, description="linear layers and layer norms have a bias")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} must be divisible by n_head={self.n_head}")
        return self
