"""The text of a configuration as it would be trained on, for `cairn data CONFIG`: read once, nothing is written."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cairn.model.configuration.data import DataConfig, MixtureStage
from cairn.storage.snapshots.snapshot_manifest import RejectedRow
from cairn.tasks.data import corpus, document, snapshot_build
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
    """The sources of a configuration; `refused` says why a start would refuse them, empty if it would not.

    `mixture` has what is drawn from step 0 and from each stage's step on, none without weights.
    """

    sources: tuple[PreviewedSource, ...]
    train_documents: int
    val_documents: int
    text_bytes: int
    val_bytes: int
    left_out: tuple[LeftOut, ...]
    documents: tuple[FirstDocument, ...]
    refused: str
    mixture: tuple[MixtureStage, ...]


def preview_text(data: DataConfig, base_dir: Path) -> CorpusPreview:
    """Read all of the text; raises InvalidCorpus for a source that cannot be read at all."""
    if data.snapshot:
        raise InvalidConfiguration(f"data.sources name a snapshot: show it with `cairn data {data.snapshot}`")
    sources = corpus.open_corpus(data, base_dir)
    by_name = {source.name: source for source in sources}
    kept, left, first = Counter[str](), Counter[tuple[str, str]](), dict[tuple[str, str], RejectedRow]()
    shown = list[FirstDocument]()

    def note(piece: document.Piece) -> None:
        if isinstance(piece, RejectedRow):
            left[piece.source, piece.kind] += 1
            first.setdefault((piece.source, piece.kind), piece)
            return
        kept[piece.source] += 1
        if len(shown) < _FIRST_DOCUMENTS:
            place, text = by_name[piece.source].place_of(piece.offset_bytes), piece.text[:_SHOWN_CHARACTERS]
            split = piece.split(data.val_fraction)
            shown.append(FirstDocument(source=piece.source, place=place, split=split, bytes=piece.bytes, text=text))

    survey = document.survey_corpus(sources, data.val_fraction, None, deduplicate=data.deduplicate, on_piece=note)
    refused = ""
    try:
        snapshot_build.require_usable(survey, data)
    except document.InvalidCorpus as problem:
        refused = str(problem)
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
    return CorpusPreview(
        sources=tuple(
            PreviewedSource(name=source.name, bytes=source.bytes, unit=source.unit, documents=kept[source.name])
            for source in sources
        ),
        train_documents=survey.train_documents,
        val_documents=survey.val_documents,
        text_bytes=survey.text_bytes,
        val_bytes=survey.val_bytes,
        left_out=tuple(rows),
        documents=tuple(shown),
        refused=refused,
        mixture=data.mixture,
    )
