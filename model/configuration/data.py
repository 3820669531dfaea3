"""Which text a run learns from and how it becomes tokens."""

import math
import posixpath
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from model.errors import InvalidInput

SMALLEST_BPE_VOCABULARY = 257
"""Every byte and end-of-text: a byte-level vocabulary cannot be smaller."""

LONGEST_PERIOD = 2**30
"""Above it the products of a mixture's schedule do not fit 64 bits; weights of up to nine decimal digits stay below."""

SNAPSHOT_SOURCE = "snapshot:"
SHORTEST_SNAPSHOT_ID = 8


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


def draw_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the draws of each source in one period: the weights as the smallest integers in their ratio.

    A weight counts as the decimal number it is written as: 0.1 is one tenth.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * scale) for share in exact]
    return tuple(share // math.gcd(*whole) for share in whole)


def require_short_period(weights: Sequence[float]) -> None:
    """Raise `InvalidInput` for weights whose schedule repeats too late to be computed in 64 bits, or for none."""
    if not weights:
        raise InvalidInput("weights is empty; a mixture needs at least one component")
    period = sum(draw_shares(weights))
    if period > LONGEST_PERIOD:
        raise InvalidInput(
            f"weights={tuple(weights)} repeat after {period} draws, must be at most {LONGEST_PERIOD}; "
            "round them to fewer digits"
        )


def _require_schedule(weights: Sequence[float]) -> None:
    try:
        require_short_period(weights)
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
