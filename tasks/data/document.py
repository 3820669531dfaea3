"""The words of the data road: a document, one that was rejected, the source they came from, the refusal of bad input.

Owns the records that the corpus readers make and the snapshot builder eats. Refuses to know where text comes from
(``corpus``, ``python_corpus``) and what becomes of it (``snapshot_build``).
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from tasks.errors import TaskError

DETAIL_CHARACTERS = 200


class InvalidCorpus(TaskError):
    """The data configuration or the text it names cannot be used; the message names field, value and rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One unit of text: it lies wholly in train or wholly in val, and is followed by one end-of-text token.

    ``offset_bytes`` is where its text starts in the source, after decompression (in Parquet, which has no such place,
    the number of its row); ``sha256`` (hex) and ``bytes`` are of its UTF-8 text.
    """

    source: str
    offset_bytes: int
    text: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Refuse a document without text, which could neither be split nor learned from."""
        if self.bytes < 1:
            raise ValueError(f"bytes = {self.bytes}: the document at {self.source}:{self.offset_bytes} needs text")
        if self.offset_bytes < 0:
            raise ValueError(f"offset_bytes = {self.offset_bytes}: must be 0 or more in {self.source}")


class RejectionKind(StrEnum):
    """Why a document was left out."""

    NOT_UTF8 = "not-utf8"
    NOT_JSON = "not-json"
    MISSING_FIELD = "missing-field"
    NOT_A_STRING = "not-a-string"
    EMPTY = "empty"
    TOO_LONG = "too-long"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A document that was left out: where it lay, what is wrong with it, and in at most 200 characters what exactly."""

    source: str
    offset_bytes: int
    kind: RejectionKind
    detail: str

    def __post_init__(self) -> None:
        """Cut the detail: a listing must not grow as big as what it lists."""
        object.__setattr__(self, "detail", self.detail[:DETAIL_CHARACTERS])


Piece: TypeAlias = Document | Rejected


def document_of(source: str, offset_bytes: int, content: bytes) -> Document:
    """Make the document whose UTF-8 text is ``content``; raises UnicodeDecodeError where it is not UTF-8."""
    return Document(
        source=source,
        offset_bytes=offset_bytes,
        text=content.decode("utf-8"),
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file, or one built-in corpus, that was found readable: its content hash, and how to read its documents.

    ``name`` does not depend on the machine's folders, ``sha256`` covers the ``bytes`` bytes as they are stored,
    ``unit`` says what a document is here. ``pieces`` starts a fresh pass over documents and rejected ones, in order.
    ``group`` is the entry of the configuration it belongs to, where these are to be kept apart, else empty.
    """

    name: str
    bytes: int
    sha256: str
    unit: str
    pieces: Callable[[], Iterator[Piece]]
    group: str = ""

    def documents(self) -> Iterator[Document]:
        """Yield the documents of a fresh pass, without those that are rejected."""
        return (piece for piece in self.pieces() if isinstance(piece, Document))
