"""The text of a configuration as it would be trained on, for `cairn data CONFIG`: read once, nothing is written."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cairn.model.configuration.data import DataConfig
from cairn.storage.snapshots.snapshot_manifest import RejectedRow, SplitName
from cairn.tasks.data import corpus, document
from cairn.tasks.errors import InvalidConfiguration

_FIRST_DOCUMENTS, _SHOWN_CHARACTERS, _MOST_LEFT_OUT = 5, 400, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewedSource:
    """A source, the kind of its documents, and how many of them are trained on or held out."""

    name: str
    bytes: int
    unit: str
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Documents of one source that are left out for one reason; `place` and `detail` are of the first."""

    source: str
    kind: str
    documents: int
    place: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDocument:
    """One of the first documents; of a longer one the beginning of its `text`."""

    source: str
    place: str
    split: str
    bytes: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusPreview:
    """The sources of a configuration; `refused` says why a start would refuse them, empty if it would not."""

    sources: tuple[PreviewedSource, ...]
    train_documents: int
    val_documents: int
    text_bytes: int
    val_bytes: int
    left_out: tuple[LeftOut, ...]
    documents: tuple[FirstDocument, ...]
    refused: str


def preview_text(data: DataConfig, base_dir: Path) -> CorpusPreview:
    """Read all of the text; raises InvalidCorpus for a source that cannot be read at all."""
    if data.snapshot:
        raise InvalidConfiguration(f"data.sources name a snapshot: show it with `cairn data {data.snapshot}`")
    sources = corpus.open_corpus(data, base_dir)
    by_name = {source.name: source for source in sources}
    kept, left, first = Counter[str](), Counter[tuple[str, str]](), dict[tuple[str, str], RejectedRow]()
    shown = list[FirstDocument]()
    splits, sizes = Counter[SplitName](), Counter[SplitName]()
    for piece in document.read_corpus(sources, deduplicate=data.deduplicate):
        if isinstance(piece, RejectedRow):
            left[piece.source, piece.kind] += 1
            first.setdefault((piece.source, piece.kind), piece)
            continue
        split = piece.split(data.val_fraction)
        kept[piece.source] += 1
        splits[split] += 1
        sizes[split] += piece.bytes
        if len(shown) < _FIRST_DOCUMENTS:
            place, text = by_name[piece.source].place_of(piece.offset_bytes), piece.text[:_SHOWN_CHARACTERS]
            shown.append(FirstDocument(source=piece.source, place=place, split=split, bytes=piece.bytes, text=text))
    rows = (
        LeftOut(
            source=name,
            kind=kind,
            documents=number,
            place=by_name[name].place_of(first[name, kind].offset_bytes),
            detail=first[name, kind].detail,
        )
        for (name, kind), number in left.most_common(_MOST_LEFT_OUT)
    )
    rejected = sum(number for (_, kind), number in left.items() if kind not in document.LEFT_OUT)
    return CorpusPreview(
        sources=tuple(
            PreviewedSource(name=source.name, bytes=source.bytes, unit=source.unit, documents=kept[source.name])
            for source in sources
        ),
        train_documents=splits["train"],
        val_documents=splits["val"],
        text_bytes=sizes.total(),
        val_bytes=sizes["val"],
        left_out=tuple(rows),
        documents=tuple(shown),
        refused=_refusal(rejected, splits, data),
    )


def _refusal(rejected: int, splits: Counter[SplitName], data: DataConfig) -> str:
    try:
        document.require_few_rejected(rejected, splits.total(), data.max_rejected_fraction, "listed here")
        document.require_both_splits(splits["train"], splits["val"], data.val_fraction)
    except document.InvalidCorpus as problem:
        return str(problem)
    return ""
