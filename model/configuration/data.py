"""The section `[data]`: which text a run learns from and how it becomes tokens."""

import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from cairn.model.configuration.network import NotNegativeNumber, Positive, Section, ruled
from cairn.model.errors import InvalidInput

SMALLEST_BPE_VOCABULARY = 257
"""Every byte and end-of-text: a byte-level vocabulary cannot be smaller."""
LONGEST_PERIOD = 2**30
"""Above it the products of a mixture's schedule do not fit 64 bits; weights of up to nine decimal digits stay below."""
SNAPSHOT_SOURCE = "snapshot:"
SHORTEST_SNAPSHOT_ID = 8


class WeightStage(Section, use_attribute_docstrings=True):
    """Other weights of the sources from a step on, a table for each such step."""

    step: Positive
    """steps that are complete when these weights begin"""
    weights: tuple[NotNegativeNumber, ...]
    """as data.weights; 0 draws nothing from a source until another stage does"""


class DataConfig(Section, use_attribute_docstrings=True):
    """The text and its tokenizer."""

    sources: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    """files, globs and URLs of the text, or one snapshot:<id> of the store"""
    exclude: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """names or globs of files to leave out, such as "*.lock"; with a slash in it of a path or URL, where * also matches
    slashes; with one at its end, a folder with all that is in it"""
    val_sources: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """files, globs and URLs of held-out text of their own: then the rest of `sources` is all trained on"""
    format: Literal["auto", "text", "jsonl", "json", "parquet", "csv", "tsv"] = "auto"
    """what the files hold; auto: a known suffix of the name decides, else the first bytes"""
    separator: Annotated[str, Field(pattern=r"^[^\r\n]*$")] = ruled("", "one line")
    """a line that divides a file of text into documents; empty: a file is one"""
    # The JSON reader cannot look for quotes, backslashes and control characters.
    text_field: Annotated[str, Field(pattern=r'^[^"\\\x00-\x1f]+$')] = ruled(
        "text", "a name without quotes, backslashes and control characters"
    )
    """field of a JSON line or column of a Parquet file that holds the text"""
    loss_on: Literal["answers"] | None = None
    """answers: the text is rows with messages, or with prompt and completion, and the loss counts the tokens of answers
    alone; not set: it is text, of which every token counts"""
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """share of the text that is held out for evaluation"""
    split: Literal["auto", "documents", "end"] = "auto"
    """what of files of text is held out: the end of each, or some documents, each by its own hash; auto: the end of up
    to 100 files. Lines of JSON and rows are documents always"""
    tokenizer: str = ruled("bpe:1024", "bytes, bpe:<vocabulary size> or the path of a tokenizer.json")
    """how text becomes tokens"""
    end_of_text: str = ""
    """token of a tokenizer.json that ends a document, such as "<EOT>"; empty: one that is known, such as </s>"""
    tokenizer_bytes: Positive = 256 * 1024 * 1024
    """most text that a bpe tokenizer learns from"""
    max_document_bytes: Annotated[int, Field(ge=64)] = 256 * 1024
    """longer documents are cut, at a paragraph or a line where there is one"""
    max_rejected_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    """share of the documents that may be unusable, and of the text that a tokenizer.json may not know, before the data
    is refused"""
    deduplicate: bool = False
    """leave out documents that are byte for byte equal to an earlier one"""
    weights: tuple[NotNegativeNumber, ...] = ()
    """proportions in which windows are drawn from the sources, one for each; none: all text alike"""
    stages: tuple[WeightStage, ...] = ()
    """steps from which other weights hold; every source goes on where it stopped"""

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_is_known(cls, value: str) -> str:
        kind, _, size = value.partition(":")
        if value == "bytes" or value.endswith(".json"):
            return value
        if kind != "bpe":
            raise ValueError("must be 'bytes', 'bpe:<size>' or the path of a tokenizer.json")
        if not (size.isascii() and size.isdigit() and int(size) >= SMALLEST_BPE_VOCABULARY):
            rule = f"must be a whole number of at least {SMALLEST_BPE_VOCABULARY} (256 bytes and end-of-text)"
            raise ValueError(f"the size after 'bpe:' {rule}")
        return value

    @model_validator(mode="after")
    def _weights_fit_sources(self) -> Self:
        if not self.weights:
            if self.stages:
                raise ValueError("stages: change weights, and there are none; add data.weights, which hold from step 0")
            return self
        if later := [after.step for before, after in pairwise(self.stages) if after.step <= before.step]:
            raise ValueError(f"stages: step {later[0]} must be greater than that of the stage before")
        for step, weights in self.weights_by_step.items():
            name = f"stages: from step {step}" if step else "weights"
            if (count := len(weights)) != len(self.sources):
                raise ValueError(f"{name}: {count} of them, must be as many as the {len(self.sources)} sources")
            try:
                require_short_period(weights)
            except InvalidInput as error:
                raise ValueError(f"{name}: {error}") from error
        weighted = zip(self.sources, *self.weights_by_step.values(), strict=True)
        if unused := [source for source, *given in weighted if not any(given)]:
            raise ValueError(f"weights: {unused[0]!r} has 0 from the first step to the last; leave it out of sources")
        twice = sorted({name for name in self.source_names if self.source_names.count(name) > 1})
        if twice:
            rule = "with weights every entry of sources and val_sources is named once"
            raise ValueError(f"{twice[0]!r} is named twice; {rule}")
        return self

    @model_validator(mode="after")
    def _snapshot_stands_alone(self) -> Self:
        named = [source for source in self.sources if source.startswith(SNAPSHOT_SOURCE)]
        if not named:
            return self
        if len(self.sources) > 1:
            raise ValueError(f"sources: {named[0]!r} must be the only one; a snapshot cannot be mixed with others")
        beginning = named[0].removeprefix(SNAPSHOT_SOURCE)
        if not (SHORTEST_SNAPSHOT_ID <= len(beginning) <= 64 and set(beginning) <= set("0123456789abcdef")):
            rule = f"must name a snapshot's id or at least its first {SHORTEST_SNAPSHOT_ID} characters"
            raise ValueError(f"sources: {named[0]} {rule}, as `cairn data` and `cairn import-tokens` print it")
        if changed := [name for name in self.changed if name != "sources"]:
            problem = f"decided by {named[0]!r} already, which was made with its own"
            raise ValueError(f"{', '.join(changed)}: {problem}; leave them out")
        return self

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        if self.end_of_text and not self.tokenizer.endswith(".json"):
            raise ValueError(f"end_of_text: {self.tokenizer} has its own end of text; leave it out")
        if self.val_sources and self.split != "auto":
            raise ValueError(f"val_sources: decide what is held out; leave out split = {self.split!r}")
        built_in = [name for name in (*self.sources, *self.val_sources) if name.startswith("python:")]
        if self.loss_on and built_in:
            raise ValueError(f"loss_on: {built_in[0]!r} holds no conversations; name files of JSON or Parquet")
        if unread := [name for name in ("text_field", "max_document_bytes") if self.loss_on and name in self.changed]:
            raise ValueError(f"{unread[0]}: has no effect on conversations; leave it out, or loss_on")
        if twice := sorted({*self.sources} & {*self.val_sources}):
            raise ValueError(f"val_sources: {twice[0]!r} is named by sources too; held-out text is not trained on")
        return self

    @property
    def changed(self) -> tuple[str, ...]:
        """The keys whose values are not the defaults."""
        fields = type(self).model_fields
        return tuple(name for name in fields if getattr(self, name) != fields[name].default)

    @property
    def weights_by_step(self) -> Mapping[int, tuple[float, ...]]:
        """The weights from step 0 and from the step of each stage on; empty without weights."""
        return {0: self.weights, **{stage.step: stage.weights for stage in self.stages}} if self.weights else {}

    @property
    def mixture(self) -> tuple["MixtureStage", ...]:
        """The shares of the draws from each of those steps on, in order."""
        stages = []
        for step, weights in self.weights_by_step.items():
            named = zip(self.sources, shares := draw_shares(weights), strict=True)
            stages.append(MixtureStage(from_step=step, shares={name: share / sum(shares) for name, share in named}))
        return tuple(stages)

    def placed(self, source: str) -> Literal["train", "val"] | None:
        """Return the split of all documents of an entry; None where each has its own."""
        if not self.val_sources:
            return None
        return "val" if source in self.val_sources else "train"

    @property
    def snapshot(self) -> str | None:
        """The id, or its beginning, of the snapshot that is the source; None where the source is text."""
        source = self.sources[0]
        return source.removeprefix(SNAPSHOT_SOURCE) if source.startswith(SNAPSHOT_SOURCE) else None

    @property
    def source_names(self) -> tuple[str, ...]:
        """A name for each source, then each of val_sources, equal wherever the text lies: paths are relative to the
        folder they all share.

        URLs and built-in sources stay as they are, and so do paths where some are absolute and others are not.
        """
        entries = (*self.sources, *self.val_sources)
        paths = [posixpath.normpath(source) for source in entries if _is_path(source)]
        root = ""
        if len({posixpath.isabs(path) for path in paths}) == 1:
            root = posixpath.join(posixpath.commonpath([posixpath.dirname(path) for path in paths]), "")
        return tuple(posixpath.normpath(source)[len(root) :] if _is_path(source) else source for source in entries)

    @property
    def bpe_vocab_size(self) -> int | None:
        """Vocabulary size of `bpe:<size>`, in tokens; None for bytes or a tokenizer file."""
        kind, _, size = self.tokenizer.partition(":")
        return int(size) if kind == "bpe" and size.isdigit() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureStage:
    """The share of the draws, 0 to 1, that each source has from a step on."""

    from_step: int
    shares: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedBefore:
    """The steps, samples and tokens of the runs that a fork was forked from, up to its first step.

    `component_draws` are the draws of each component of its own data among them: zeros for data that is new, none for
    a run that begins at step 0.
    """

    step: int = 0
    draws: int = 0
    tokens: int = 0
    component_draws: tuple[int, ...] = ()


NOTHING_BEFORE = TrainedBefore()


def draw_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the draws of each source in one period: the smallest integers in the ratio of the weights as decimals."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * scale) for share in exact]
    return tuple(share // math.gcd(*whole) for share in whole)


def require_short_period(weights: Sequence[float]) -> None:
    """Raise `InvalidInput` for no weights, and for weights whose period is too long for 64-bit arithmetic."""
    if not weights:
        raise InvalidInput("weights is empty; a mixture needs at least one component")
    if not any(weights):
        raise InvalidInput(f"weights={tuple(weights)} draw nothing; at least one must be above 0")
    period = sum(draw_shares(weights))
    if period > LONGEST_PERIOD:
        draws, rule = f"10^{len(str(period)) - 1}", f"must be at most {LONGEST_PERIOD}; round them to fewer digits"
        raise InvalidInput(f"weights={tuple(weights)} repeat after {draws} draws or more, {rule}")


def _is_path(source: str) -> bool:
    return "://" not in source and not source.startswith("python:")
