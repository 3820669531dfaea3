"""The text of a configuration as it would be trained on, for `cairn data CONFIG`: nothing is written."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.model.configuration.data import DataConfig, MixtureStage
from cairn.storage.snapshots.snapshot_manifest import RejectedRow
from cairn.tasks.data import corpus, document, snapshot_build, snapshot_lookup
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

    `unknown_bytes` of the text the tokenizer.json does not know; None without one, and for much text.
    `mixture` has what is drawn from step 0 and from each stage's step on, none without weights.
    """

    sources: tuple[PreviewedSource, ...]
    train_documents: int
    val_documents: int
    text_bytes: int
    val_bytes: int
    left_out: tuple[LeftOut, ...]
    unknown_bytes: int | None
    documents: tuple[FirstDocument, ...]
    refused: str
    notes: tuple[str, ...]
    mixture: tuple[MixtureStage, ...]


class _Rows:
    """The rows of a pass over the text: numbers of documents, those that are left out, and the first ones."""

    def __init__(self) -> None:
        self.kept, self.left = Counter[str](), Counter[tuple[str, str]]()
        self.first = dict[tuple[str, str], RejectedRow]()
        self.shown = list[document.Document]()

    def add(self, piece: document.Piece) -> None:
        """Count a document, or one that is left out."""
        if isinstance(piece, RejectedRow):
            self.left[piece.source, piece.kind] += 1
            self.first.setdefault((piece.source, piece.kind), piece)
            return
        self.kept[piece.source] += 1
        if len(self.shown) < _FIRST_DOCUMENTS:
            self.shown.append(piece)

    def places(self, sources: Sequence[document.Source]) -> Mapping[tuple[str, int], str]:
        """Return where each row that is shown is; reads a source once, however many of its rows are shown."""
        offsets = defaultdict[str, set[int]](set)
        rows: list[document.Piece] = [*self.first.values(), *self.shown]
        for row in rows:
            offsets[row.source].add(row.offset_bytes)
        readable = (source for source in sources if source.name in offsets)
        found = ((source.name, source.places_of(offsets[source.name])) for source in readable)
        return {(name, offset): place for name, places in found for offset, place in places.items()}


def preview_text(data: DataConfig, base_dir: Path) -> CorpusPreview:
    """Read all of the text; raises InvalidCorpus for a source that cannot be read at all."""
    if data.snapshot:
        raise InvalidConfiguration(f"data.sources name a snapshot: show it with `cairn data {data.snapshot}`")
    sources, rows = corpus.open_corpus(data, base_dir), _Rows()
    survey = document.survey_corpus(sources, data.val_fraction, None, deduplicate=data.deduplicate, on_piece=rows.add)
    refused, turned_off, unknown_bytes = "", tuple[str, ...](), None
    try:
        snapshot_build.require_usable(survey, data)
        if given := snapshot_build.given_tokenizer(data, base_dir):
            turned_off = given.turned_off
            if data.tokenizer.endswith(".json") and survey.text_bytes <= corpus.PREVIEW_BYTES:
                unknown_bytes = snapshot_build.count_unknown_bytes(sources, data, given)
    except document.InvalidCorpus as problem:
        refused = str(problem)
    places = rows.places(sources)
    return CorpusPreview(
        sources=tuple(
            PreviewedSource(name=source.name, bytes=source.bytes, unit=source.unit, documents=rows.kept[source.name])
            for source in sources
        ),
        train_documents=survey.train_documents,
        val_documents=survey.val_documents,
        text_bytes=survey.text_bytes,
        val_bytes=survey.val_bytes,
        left_out=tuple(
            LeftOut(
                source=name,
                kind=kind,
                documents=number,
                place=places[name, rows.first[name, kind].offset_bytes],
                detail=rows.first[name, kind].detail,
            )
            for (name, kind), number in rows.left.most_common(_MOST_LEFT_OUT)
        ),
        unknown_bytes=unknown_bytes,
        documents=tuple(
            FirstDocument(
                source=piece.source,
                place=places[piece.source, piece.offset_bytes],
                split=piece.split(data.val_fraction),
                bytes=piece.bytes,
                text=piece.text[:_SHOWN_CHARACTERS],
            )
            for piece in rows.shown
        ),
        refused=refused,
        notes=snapshot_lookup.describe_tokenizer(turned_off, 0, survey.text_bytes),
        mixture=data.mixture,
    )
