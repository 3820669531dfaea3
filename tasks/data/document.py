"""The records of the text pipeline, the rule that assigns a document to train or val, and the survey of a corpus.

By its own content, so that a growing corpus moves no document (A. Géron, Hands-On Machine Learning, chapter 2), or by
its place in a text of which the end is held out, as nanoGPT does. The survey is one pass before tokenization.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from cairn.model.configuration.data import DataConfig
from cairn.storage.snapshots.snapshot_manifest import RejectedRow, SplitName
from cairn.storage.stores.codec import sha256
from cairn.tasks.data.rejection import LEFT_OUT, RejectionKind
from cairn.tasks.errors import InvalidConfiguration

_REPORT_EVERY_PIECES = 1024
_SAMPLED_SOURCES, _SAMPLED_CHARACTERS = 64, 8192


Spans = tuple[tuple[int, int], ...]
"""Beginnings and ends in characters."""


class InvalidCorpus(InvalidConfiguration):
    """The data configuration or its text cannot be used; the message names field, value and rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One unit of text, wholly in train or wholly in val, followed by one end-of-text token if `ends`.

    `offset_bytes` is its start in the decompressed source, or the line or Parquet row it was cut from; hash and size
    are of its UTF-8 text. `placed` is the split that its place gives it; None leaves that to its hash. The loss
    of a conversation counts the characters of `answers`, of which one behind the text is its end-of-text token.
    """

    source: str
    offset_bytes: int
    text: str
    bytes: int
    sha256: str
    placed: SplitName | None = None
    ends: bool = True
    answers: Spans = ()

    def split(self, val_fraction: float) -> SplitName:
        """Return its split."""
        return self.placed or split_of(self.sha256, val_fraction)


DUPLICATE_DETAIL = "the same text as an earlier document, sha256 "
Piece = Document | RejectedRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One readable file or built-in corpus: its content hash, and how to read its documents.

    `name` does not depend on the machine's folders; `sha256` and `bytes` are of the stored file; `pieces` starts a new
    pass in order; `group` is its entry of `data.sources` if weights keep the entries apart. Of a text whose end is
    held out, `border` is where the held-out part begins and `text_bytes` where it ends, known without reading it.
    `placed` is the split of all of it where the configuration says one, `form` a format that the unit does not tell;
    `places_of` says in words where in the source offsets are, by reading it once. `check` returns the source with its
    hash; None if it has one.
    """

    name: str
    bytes: int
    sha256: str
    unit: str
    pieces: Callable[[], Iterator[Piece]]
    group: str = ""
    border: int | None = None
    text_bytes: int = 0
    placed: SplitName | None = None
    form: str = ""
    places_of: Callable[[Collection[int]], Mapping[int, str]] = lambda offsets: {at: f"byte {at}" for at in offsets}
    check: Callable[[], "Source"] | None = None

    def documents(self) -> Iterator[Document]:
        """Yield the documents of a new pass, without rejected ones."""
        for piece in self.pieces():  # not a generator expression: that would begin to read before it is asked
            if isinstance(piece, Document):
                yield piece

    def sizes(self, val_fraction: float) -> Iterator[tuple[SplitName, int]]:
        """Yield split and bytes of each document, or of the two parts of a text whose end is held out."""
        if self.border is None:
            return ((document.split(val_fraction), document.bytes) for document in self.documents())
        parts: tuple[tuple[SplitName, int], ...] = ("train", self.border), ("val", self.text_bytes - self.border)
        return (part for part in parts if part[1])


def make_document(
    source: str, at: int, content: bytes, placed: SplitName | None = None, ends: bool = True, answers: Spans = ()
) -> Document:
    """Return the document with the UTF-8 text `content` at an offset in bytes; raises UnicodeDecodeError."""
    text, size, digest = content.decode("utf-8"), len(content), sha256(content)
    return Document(
        source=source, offset_bytes=at, text=text, bytes=size, sha256=digest, placed=placed, ends=ends, answers=answers
    )


def is_expressible(text: str) -> bool:
    """Whether the text is also UTF-8: Python's own has lone surrogates, for foreign bytes too."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def split_of(content_sha256: str, val_fraction: float) -> SplitName:
    """Return the split of the document with this hash; a greater fraction moves documents only from train to val."""
    # Python compares int with float exactly, so no rounding can make two machines disagree.
    return "val" if int(content_sha256[:16], 16) < val_fraction * 2.0**64 else "train"


def require_both_splits(train: int, val: int, data: DataConfig, rejected: RejectedRow | None = None) -> None:
    """Raise InvalidCorpus if a split has no document; if none has, for the reason that `rejected` gives."""
    if train and val:
        return
    if rejected is not None and not train + val:
        first = f"{rejected.source}, offset {rejected.offset_bytes}: {rejected.kind}: {rejected.detail}"
        rule = "the text is UTF-8, of a line of JSON the field data.text_field"
        raise InvalidCorpus(f"data.sources: no document can be used; the first: {first}; rule: {rule}")
    empty, remedy = ("val", "raise") if train else ("train", "lower")
    none = f"none of the {train + val} documents fell into the {empty} split"
    if data.val_sources:
        raise InvalidCorpus(f"data.val_sources: {none}; rule: they hold out a part of the text. Name other files")
    rule = f"train and val each need at least one document. Add text, or {remedy} data.val_fraction, or lower "
    rule += 'data.max_document_bytes, or hold out the end of each text: data.split = "end"'
    raise InvalidCorpus(f"data.val_fraction = {data.val_fraction}: {none}; rule: {rule}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Counts of documents and text; `worst` is the most frequent fault in one source, and where it first is."""

    train_documents: int
    val_documents: int
    text_bytes: int
    rejected: int
    worst: str
    val_bytes: int = 0


class TextSample:
    """Keeps the texts with the smallest hashes, up to `limit_bytes` (a bottom-k sketch, Cohen and Kaplan 2007)."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._size_bytes = limit_bytes, 0
        self._bound = 1 << 256  # the smallest hash that did not fit
        self._kept: list[tuple[int, bytes]] = []  # a heap, the greatest hash first

    def offer(self, document: Document) -> None:
        """Add the document's text, and drop the texts with the greatest hashes that no longer fit."""
        if (number := int(document.sha256, 16)) >= self._bound:
            return
        heapq.heappush(self._kept, (-number, document.text.encode("utf-8")))
        self._size_bytes += document.bytes
        while self._kept and (self._size_bytes > self._limit_bytes or -self._kept[0][0] == self._bound):
            greatest, content = heapq.heappop(self._kept)
            self._bound, self._size_bytes = -greatest, self._size_bytes - len(content)

    def texts(self) -> Iterator[str]:
        """Yield the texts in the order of their hashes, each as often as it was offered."""
        for _, content in sorted(self._kept, reverse=True):
            yield content.decode("utf-8")


def sample_texts(sources: Sequence[Source]) -> Iterator[str]:
    """Yield the beginnings of some documents, spread over the sources."""
    for source in sources[:: max(1, len(sources) // _SAMPLED_SOURCES)]:
        for found in islice(source.documents(), max(2, _SAMPLED_SOURCES // len(sources))):
            yield found.text[:_SAMPLED_CHARACTERS]


def read_corpus(sources: Sequence[Source], *, deduplicate: bool) -> Iterator[Piece]:
    """Yield the pieces of all sources; with `deduplicate` a document with the text of an earlier one is rejected."""
    seen = set[bytes]()
    for piece in (piece for source in sources for piece in source.pieces()):
        if deduplicate and isinstance(piece, Document):
            if (digest := short_hash(piece.sha256)) in seen:
                where, kind, detail = piece.offset_bytes, RejectionKind.DUPLICATE, DUPLICATE_DETAIL + piece.sha256
                yield RejectedRow(source=piece.source, offset_bytes=where, kind=kind, detail=detail)
                continue
            seen.add(digest)
        yield piece


def short_hash(sha256: str) -> bytes:
    """Return the kept part of a document's hash: 128 bits tell more texts apart than there are."""
    return bytes.fromhex(sha256[:32])


def survey_corpus(
    sources: Sequence[Source],
    val_fraction: float,
    sample: TextSample | None,
    *,
    deduplicate: bool,
    pieces: Iterator[Piece] | None = None,
    on_text: Callable[[int, int], None] = lambda size_bytes, documents: None,
    on_piece: Callable[[Piece], None] = lambda piece: None,
) -> Survey:
    """Read everything once; offers the train text to `sample`, calls on_text(bytes, documents) and on_piece of each.

    Where the `pieces` of the sources were read before, those are surveyed.
    """
    val_bytes = 0
    documents, text_bytes, rejected = Counter[SplitName](), 0, Counter[tuple[str, str]]()
    first = dict[tuple[str, str], RejectedRow]()
    for count, piece in enumerate(pieces or read_corpus(sources, deduplicate=deduplicate)):
        on_piece(piece)
        if isinstance(piece, RejectedRow):
            rejected[piece.source, piece.kind] += piece.kind not in LEFT_OUT
            first.setdefault((piece.source, piece.kind), piece)
        else:
            split = piece.split(val_fraction)
            documents[split] += 1
            text_bytes += piece.bytes
            val_bytes += piece.bytes if split == "val" else 0
            if sample and split == "train":
                sample.offer(piece)  # a vocabulary learned from val would leak it
        if count % _REPORT_EVERY_PIECES == 0:
            on_text(text_bytes, documents.total())
    (source, kind), number = max(rejected.items(), key=lambda item: (item[1], item[0]), default=(("", ""), 0))
    worst = f"{number} of them {kind} in {source}"
    if number:
        row, found = first[source, kind], next(one for one in sources if one.name == source)
        worst += f", the first at {found.places_of([row.offset_bytes])[row.offset_bytes]}: {row.detail}"
    train, val, bad = documents["train"], documents["val"], rejected.total()
    return Survey(
        train_documents=train, val_documents=val, text_bytes=text_bytes, val_bytes=val_bytes, rejected=bad, worst=worst
    )


def require_few_rejected(rejected: int, documents: int, max_fraction: float, where: str) -> None:
    """Raise InvalidCorpus if more than `max_fraction` of the documents are rejected; `where` names them."""
    if rejected > max_fraction * (rejected + documents):
        problem = f"{rejected} of {rejected + documents} documents cannot be used, {where}"
        rule = "at most this share is left out. Correct the text, or raise data.max_rejected_fraction"
        raise InvalidCorpus(f"data.max_rejected_fraction = {max_fraction}: {problem}; rule: {rule}")


def require_few_unknown(unknown_bytes: int, text_bytes: int, max_fraction: float, where: str) -> None:
    """Raise InvalidCorpus if the tokenizer does not know more than `max_fraction` of the text."""
    if unknown_bytes > max_fraction * text_bytes:
        problem = f"the tokenizer does not know {unknown_bytes:,} of {text_bytes:,} bytes of text{where}"
        rule = "at most this share. Take another data.tokenizer, or raise data.max_rejected_fraction"
        raise InvalidCorpus(f"data.max_rejected_fraction = {max_fraction}: {problem}; rule: {rule}")
