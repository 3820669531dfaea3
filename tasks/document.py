"""The words of the data road: a document, the source it came from, and the refusal of bad input.

Owns the records that the corpus readers make and the snapshot builder eats. Refuses to know where text comes from
(``corpus``, ``python_corpus``) and what becomes of it (``snapshot_build``).
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tasks.errors import TaskError


class InvalidCorpus(TaskError):
    """The data configuration or the text it names cannot be used; the message names field, value and rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One unit of text: it lies wholly in train or wholly in val, and is followed by one end-of-text token.

    ``offset_bytes`` is where its text starts in the source; ``sha256`` (hex) and ``bytes`` are of its UTF-8 text.
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

    ``name`` does not depend on the machine's folders, ``sha256`` covers the ``bytes`` bytes that the documents are
    made from, ``unit`` says what a document is here. ``documents`` starts a fresh pass over them at every call.
    """

    name: str
    bytes: int
    sha256: str
    unit: str
    documents: Callable[[], Iterator[Document]]
