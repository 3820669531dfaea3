"""The section `[training.lora]`, and the table of the low-rank adapters that it puts beside a network's matrices.

Imports no torch. Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from cairn.model.configuration.network import ModelConfig, Positive, PositiveNumber, Section, parameter_table
from cairn.model.errors import InvalidInput


class LoraConfig(Section, use_attribute_docstrings=True):
    """Low-rank adapters, trained beside frozen weights of training.init_from. Without the section all weights are."""

    rank: Positive = 8
    """rank of each adapter: numbers between its two matrices"""
    alpha: PositiveNumber = Field(
        default_factory=lambda data: 2.0 * data.get("rank", 1), json_schema_extra={"default_rule": "2 rank"}
    )
    """what an adapter adds is multiplied by alpha / rank"""
    targets: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+$")], ...], Field(min_length=1)] | None = (
        Field(None, json_schema_extra={"rule": "a list of names", "default_rule": "all of attention and feed-forward"})
    )
    """linear layers that get an adapter, by the ends of their names in transformers, such as q_proj, or here"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRow:
    """An adapter of `rows` of the linear layer `layer`; in `transformers` they are `theirs`, of as many `columns`."""

    layer: str
    rows: slice
    columns: int
    theirs: str

    @property
    def name(self) -> str:
        """Its name in the network; it has the matrices `A` and `B`."""
        return f"{self.layer}.lora.{self.leaf}"

    @property
    def leaf(self) -> str:
        """The last part of their name."""
        return self.theirs.rpartition(".")[2]

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B."""
        return (rank, self.columns), (self.rows.stop - self.rows.start, rank)


def adapter_table(model: ModelConfig, targets: tuple[str, ...] | None = None) -> tuple[AdapterRow, ...]:
    """Return the adapters of these targets, None for all, in the network's order; InvalidInput names one without any.

    A target is the end of a layer's name, as in peft.
    """
    rows = tuple(_rows(model))
    if targets is None:
        return rows
    for target in targets:
        if not any(_is_meant(row, target) for row in rows):
            known = ", ".join(dict.fromkeys(row.leaf for row in rows))
            raise InvalidInput(f"training.lora.targets: {target!r} is no linear layer of the network; it has {known}")
    return tuple(row for row in rows if any(_is_meant(row, target) for target in targets))


def count_trained(model: ModelConfig, lora: LoraConfig) -> tuple[int, ...]:
    """Return how many numbers each tensor has that is trained, in the network's order."""
    rows = adapter_table(model, lora.targets)
    return tuple(math.prod(shape) for row in rows for shape in row.shapes(lora.rank))


def _is_meant(row: AdapterRow, target: str) -> bool:
    return any(f".{name}".endswith(f".{target}") for name in (row.theirs, row.layer))


def _rows(model: ModelConfig) -> Iterator[AdapterRow]:
    for parameter in parameter_table(model, 1):
        if parameter.kind != "matrix":
            continue
        layer, begin = parameter.name.removesuffix(".weight"), 0
        counts = parameter.rows if len(parameter.theirs) > 1 else (sum(parameter.rows),)
        for theirs, count in zip(parameter.theirs or (parameter.name,), counts, strict=True):
            rows, named = slice(begin, begin + count), theirs.removesuffix(".weight")
            yield AdapterRow(layer=layer, rows=rows, columns=parameter.shape[1], theirs=named)
            begin += count
