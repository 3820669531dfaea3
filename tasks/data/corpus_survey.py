"""One look at the whole corpus before any of it is tokenized: how much there is, how bad it is, what to learn from.

Owns the counts, the refusal of a corpus with too many bad documents, and the choice of the tokenizer's text. Refuses to
know tokens and files. The choice is a bottom-k sketch (Cohen and Kaplan 2007): the texts of smallest hash that fit,
which no order and no number of workers can change.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tasks.data.document import Document, InvalidCorpus, Piece, Rejected, RejectionKind, Source
from tasks.data.document_split import Split, split_of
from tasks.data.seen_digests import SeenDigests

_TOLD_EVERY_PIECES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What a corpus holds: documents of each split, bytes of their text, and how many documents are bad.

    ``worst_source`` and ``worst_kind`` say where most of the bad ones are and what they have; empty where none is bad.
    """

    train_documents: int
    val_documents: int
    text_bytes: int
    rejected: int
    worst_source: str
    worst_kind: str
    worst_documents: int


class TextSample:
    """Keeps at most ``limit_bytes`` of the texts offered: those of smallest content hash, whatever their order."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._held = limit_bytes, 0
        self._bound = ""  # the smallest hash that did not fit; empty while all did
        self._texts: dict[str, tuple[bytes, int]] = {}
        self._greatest: list[tuple[int, str]] = []

    def offer(self, document: Document) -> None:
        """Take the document's text, and give up the ones of greatest hash that no longer fit."""
        key = document.sha256
        if self._bound and key >= self._bound:
            return
        content, copies = self._texts.get(key) or (document.text.encode("utf-8"), 0)
        if not copies:
            heapq.heappush(self._greatest, (-int(key, 16), key))
        self._texts[key] = (content, copies + 1)
        self._held += document.bytes
        while self._held > self._limit:
            _, self._bound = heapq.heappop(self._greatest)
            content, copies = self._texts.pop(self._bound)
            self._held -= len(content) * copies

    def texts(self) -> Iterator[str]:
        """Yield the texts in the order of their hashes, each as often as it was offered."""
        for key in sorted(self._texts):
            content, copies = self._texts[key]
            for _ in range(copies):
                yield content.decode("utf-8")


def without_duplicates(pieces: Iterator[Piece], seen: SeenDigests) -> Iterator[Piece]:
    """Yield the pieces, a document whose text was seen before as rejected; memory grows as ``SeenDigests`` says."""
    for piece in pieces:
        if isinstance(piece, Document) and not seen.add(piece.sha256):
            yield Rejected(
                source=piece.source,
                offset_bytes=piece.offset_bytes,
                kind=RejectionKind.DUPLICATE,
                detail=f"the same text as an earlier document, sha256 {piece.sha256}",
            )
        else:
            yield piece


def survey_corpus(
    sources: Sequence[Source],
    val_fraction: float,
    sample: TextSample | None,
    *,
    deduplicate: bool,
    on_bytes: Callable[[int, int], None],
) -> Survey:
    """Read everything once: count, and offer the train text to ``sample``; tells ``on_bytes`` of bytes, documents."""
    pieces = (piece for source in sources for piece in source.pieces())
    held, text_bytes, rejected = Counter[Split](), 0, Counter[tuple[str, RejectionKind]]()
    for number, piece in enumerate(without_duplicates(pieces, SeenDigests()) if deduplicate else pieces):
        if isinstance(piece, Rejected):
            rejected[piece.source, piece.kind] += piece.kind is not RejectionKind.DUPLICATE
        else:
            split = split_of(piece.sha256, val_fraction)
            held[split] += 1
            text_bytes += piece.bytes
            if sample and split is Split.TRAIN:
                sample.offer(piece)  # of train only: a vocabulary learned from val would leak it
        if number % _TOLD_EVERY_PIECES == 0:
            on_bytes(text_bytes, held.total())
    worst = max(rejected.items(), key=lambda item: (item[1], item[0]), default=(("", ""), 0))
    return Survey(
        train_documents=held[Split.TRAIN],
        val_documents=held[Split.VAL],
        text_bytes=text_bytes,
        rejected=rejected.total(),
        worst_source=worst[0][0],
        worst_kind=str(worst[0][1]),
        worst_documents=worst[1],
    )


def require_few_rejected(rejected: int, documents: int, max_fraction: float, where: str) -> None:
    """Refuse a corpus (InvalidCorpus) whose share of bad documents is above ``max_fraction``; ``where`` names them."""
    if rejected <= max_fraction * (rejected + documents):
        return
    raise InvalidCorpus(
        f"data.max_rejected_fraction = {max_fraction}: {rejected} of {rejected + documents} documents cannot be used, "
        f"{where}; rule: at most this share is left out. Correct the text, or raise data.max_rejected_fraction"
    )
