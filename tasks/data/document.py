"""The records of the text pipeline, and the rule that assigns a document to train or val by its own content.

A growing corpus therefore moves no document (A. Géron, Hands-On Machine Learning, chapter 2).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from storage.stores.document import sha256
from tasks.errors import TaskError

if TYPE_CHECKING:  # every command loads this module, and the index loads pyarrow
    from storage.snapshots.document_index import SplitName


class InvalidCorpus(TaskError):
    """The data configuration or its text cannot be used; the message names field, value and rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One unit of text, wholly in train or wholly in val, followed by one end-of-text token.

    `offset_bytes` is its start in the decompressed source, or its Parquet row; hash and size are of its UTF-8 text.
    """

    source: str
    offset_bytes: int
    text: str
    bytes: int
    sha256: str


class RejectionKind(StrEnum):
    """Why a document was rejected."""

    NOT_UTF8 = "not-utf8"
    NOT_JSON = "not-json"
    MISSING_FIELD = "missing-field"
    NOT_A_STRING = "not-a-string"
    EMPTY = "empty"
    TOO_LONG = "too-long"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A rejected document: its place, the kind of fault, and details."""

    source: str
    offset_bytes: int
    kind: RejectionKind
    detail: str


Piece: TypeAlias = Document | Rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One readable file or built-in corpus: its content hash, and how to read its documents.

    `name` does not depend on the machine's folders; `sha256` and `bytes` are of the stored file; `pieces` starts a new
    pass in order; `group` is its entry of `data.sources` if weights keep the entries apart.
    """

    name: str
    bytes: int
    sha256: str
    unit: str
    pieces: Callable[[], Iterator[Piece]]
    group: str = ""

    def documents(self) -> Iterator[Document]:
        """Yield the documents of a new pass, without rejected ones."""
        return (piece for piece in self.pieces() if isinstance(piece, Document))


def make_document(source: str, offset_bytes: int, content: bytes, text: str | None = None) -> Document:
    """Return the document with the UTF-8 text `content`, decoded unless `text` is given; raises UnicodeDecodeError."""
    text = content.decode("utf-8") if text is None else text
    return Document(source=source, offset_bytes=offset_bytes, text=text, bytes=len(content), sha256=sha256(content))


def split_of(content_sha256: str, val_fraction: float) -> "SplitName":
    """Return the split of the document with this hash; a greater fraction moves documents only from train to val."""
    # Python compares int with float exactly, so no rounding can make two machines disagree.
    drawn = int(content_sha256[:16], 16)
    return "val" if drawn < val_fraction * 2.0**64 else "train"


def require_both_splits(train_documents: int, val_documents: int, val_fraction: float) -> None:
    """Raise InvalidCorpus if a split is empty."""
    if train_documents and val_documents:
        return
    empty, remedy = ("val", "raise") if train_documents else ("train", "lower")
    raise InvalidCorpus(
        f"data.val_fraction = {val_fraction}: none of the {train_documents + val_documents} documents fell into the "
        f"{empty} split; rule: train and val each need at least one document. Add text, or {remedy} "
        "data.val_fraction, or name a file by its path instead of by a glob: its blank-line-separated blocks are "
        "then the documents"
    )
