"""One pass over the corpus before tokenization: counts, duplicates, rejected documents, and the tokenizer's sample."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cairn.storage.snapshots.document_index import SplitName
from cairn.tasks.data.document import Document, InvalidCorpus, Piece, Rejected, RejectionKind, Source

_REPORT_EVERY_PIECES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Counts of documents and text; `worst_*` is the most frequent fault in one source, empty if there is none."""

    train_documents: int
    val_documents: int
    text_bytes: int
    rejected: int
    worst_source: str
    worst_kind: str
    worst_documents: int


class TextSample:
    """Keeps the texts with the smallest hashes, up to `limit_bytes` (a bottom-k sketch, Cohen and Kaplan 2007)."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._size_bytes = limit_bytes, 0
        self._bound = ""  # the smallest hash that did not fit
        self._texts: dict[str, tuple[bytes, int]] = {}
        self._greatest: list[tuple[int, str]] = []

    def offer(self, document: Document) -> None:
        """Add the document's text, and drop the texts with the greatest hashes that no longer fit."""
        key = document.sha256
        if self._bound and key >= self._bound:
            return
        content, copies = self._texts.get(key) or (document.text.encode("utf-8"), 0)
        if not copies:
            heapq.heappush(self._greatest, (-int(key, 16), key))
        self._texts[key] = (content, copies + 1)
        self._size_bytes += document.bytes
        while self._size_bytes > self._limit_bytes:
            _, self._bound = heapq.heappop(self._greatest)
            content, copies = self._texts.pop(self._bound)
            self._size_bytes -= len(content) * copies

    def texts(self) -> Iterator[str]:
        """Yield the texts in the order of their hashes, each as often as it was offered."""
        for key in sorted(self._texts):
            content, copies = self._texts[key]
            for _ in range(copies):
                yield content.decode("utf-8")


def reject_duplicates(pieces: Iterator[Piece], seen: set[bytes]) -> Iterator[Piece]:
    """Yield the pieces; a document whose hash is in `seen` becomes a rejected one, the others' are added to it."""
    for piece in pieces:
        if isinstance(piece, Document):
            if (digest := remembered(piece.sha256)) in seen:
                detail = f"the same text as an earlier document, sha256 {piece.sha256}"
                piece = Rejected(
                    source=piece.source,
                    offset_bytes=piece.offset_bytes,
                    kind=RejectionKind.DUPLICATE,
                    detail=detail,
                )
            seen.add(digest)
        yield piece


def remembered(sha256: str) -> bytes:
    """Return what is kept of a document's hash: 128 bits tell more texts apart than there are."""
    return bytes.fromhex(sha256[:32])


def survey_corpus(
    sources: Sequence[Source],
    val_fraction: float,
    sample: TextSample | None,
    *,
    deduplicate: bool,
    on_text: Callable[[int, int], None],
) -> Survey:
    """Read everything once; offers the train text to `sample`, and calls on_text(bytes, documents)."""
    pieces = (piece for source in sources for piece in source.pieces())
    documents, text_bytes, rejected = Counter[SplitName](), 0, Counter[tuple[str, RejectionKind]]()
    for number, piece in enumerate(reject_duplicates(pieces, set()) if deduplicate else pieces):
        if isinstance(piece, Rejected):
            rejected[piece.source, piece.kind] += piece.kind is not RejectionKind.DUPLICATE
        else:
            split = piece.split(val_fraction)
            documents[split] += 1
            text_bytes += piece.bytes
            if sample and split == "train":
                sample.offer(piece)  # a vocabulary learned from val would leak it
        if number % _REPORT_EVERY_PIECES == 0:
            on_text(text_bytes, documents.total())
    worst = max(rejected.items(), key=lambda item: (item[1], item[0]), default=(("", ""), 0))
    return Survey(
        train_documents=documents["train"],
        val_documents=documents["val"],
        text_bytes=text_bytes,
        rejected=rejected.total(),
        worst_source=worst[0][0],
        worst_kind=str(worst[0][1]),
        worst_documents=worst[1],
    )


def require_few_rejected(rejected: int, documents: int, max_fraction: float, where: str) -> None:
    """Raise InvalidCorpus if more than `max_fraction` of the documents are rejected; `where` names them."""
    if rejected > max_fraction * (rejected + documents):
        problem = f"{rejected} of {rejected + documents} documents cannot be used, {where}"
        rule = "at most this share is left out. Correct the text, or raise data.max_rejected_fraction"
        raise InvalidCorpus(f"data.max_rejected_fraction = {max_fraction}: {problem}; rule: {rule}")
