"""The content of a data snapshot and the origin of a window, for `cairn data`; each part is verified before its use.

Of a configuration, its text as it would be trained on: nothing is written.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from cairn.model.configuration.data import SHORTEST_SNAPSHOT_ID, DataConfig, MixtureStage
from cairn.model.data import sample_order, token_windows
from cairn.reports.errors import RunNotFound
from cairn.reports.queries.run_lookup import find_run
from cairn.storage.snapshots import data_snapshot, snapshot_manifest, token_shard
from cairn.storage.snapshots.snapshot_manifest import SPLITS, RejectedRow, SnapshotManifest, SplitName, TokenSpan
from cairn.storage.stores.codec import stored_value
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.data import corpus, document, foreign_tokenizer, snapshot_build, snapshot_lookup
from cairn.tasks.errors import InvalidConfiguration

DEFAULT_BLOCK_SIZE = 256
_MOST_LISTED = 20
_FIRST_DOCUMENTS, _SHOWN_CHARACTERS, _MOST_LEFT_OUT = 5, 400, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSummary:
    """One window: block_size tokens from `first_token` of its split on, as text, and where its documents begin.

    `groups` are the groups of its tokens, the last target included; empty where sources have no groups. A run with
    weights draws no train window of several groups: then, or where no run is known, `is_drawn` is false.
    """

    split: str
    window: int
    first_token: int
    text: str
    documents: tuple[snapshot_manifest.DocumentPlace, ...]
    groups: tuple[str, ...]
    is_drawn: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSummary:
    """Sources that are drawn together, and the train windows that are wholly theirs.

    `weight` and `share` (of draws, 0 to 1) are a run's from step 0; None where no run is given or it has no weights.
    """

    group: snapshot_manifest.SnapshotGroup
    windows: int
    weight: float | None
    share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """A snapshot: its manifest, its numbers of windows of `block_size` tokens by split, and some of the windows.

    `unknown_bytes` of its text its tokenizer does not know; None for tokens that were imported. `mixture` has what a
    run draws from step 0 and from each stage's step on, none without weights.
    """

    snapshot_id: str
    run_id: str | None
    manifest: SnapshotManifest
    block_size: int
    window_counts: Mapping[str, int]
    unknown_bytes: int | None
    groups: tuple[GroupSummary, ...]
    mixture: tuple[MixtureStage, ...]
    windows: tuple[WindowSummary, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowChoice:
    """The window to show, None for a few; block_size 0 is the run's, or `DEFAULT_BLOCK_SIZE`."""

    window: int | None = None
    split: SplitName = "train"
    block_size: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 0:
            raise InvalidConfiguration(f"--block-size {self.block_size}: must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSnapshot:
    """A snapshot; found by a run's id it has the run's id, block size and data configuration."""

    snapshot_id: str
    run_id: str | None = None
    block_size: int = 0
    data: DataConfig | None = None


def summarize_data(store: ObjectStore, reference: str, choice: WindowChoice, *, cache_dir: Path) -> DataSummary:
    """Return the summary of the snapshot that `reference` names; raises `RunNotFound` where it names none."""
    found = find_snapshot(store, reference)
    block_size = choice.block_size or found.block_size or DEFAULT_BLOCK_SIZE
    files = data_snapshot.SnapshotFiles(store, found.snapshot_id, cache_dir)
    manifest = files.manifest
    window_counts: dict[str, int] = {split: (manifest.split(split).tokens - 1) // block_size for split in SPLITS}
    weights, groups, start = snapshot_lookup.group_weights(manifest, found.data) if found.data else {}, [], 0
    for group in manifest.known_groups:
        weight = next(iter(weights.get(group.name, ())), None)
        share = None if weight is None else weight / sum(first for first, *_ in weights.values())
        _, windows = sample_order.window_range(start, group.train_tokens, block_size)
        groups.append(GroupSummary(group=group, windows=windows, weight=weight, share=share))
        start += group.train_tokens
    return DataSummary(
        snapshot_id=found.snapshot_id,
        run_id=found.run_id,
        manifest=manifest,
        block_size=block_size,
        window_counts=window_counts,
        unknown_bytes=snapshot_lookup.find_unknown_bytes(store, found.snapshot_id),
        groups=tuple(groups),
        mixture=found.data.mixture if found.data else (),
        windows=tuple(_summarize_windows(files, _choose_windows(manifest, window_counts, choice, block_size), found)),
    )


def find_snapshot(store: ObjectStore, reference: str) -> FoundSnapshot:
    """Return a run's snapshot, or the one whose id begins so, with 8 characters or more; raises `RunNotFound`."""
    snapshots = data_snapshot.list_snapshots(store)
    begins = [name for name in snapshots if name.startswith(reference) and len(reference) >= SHORTEST_SNAPSHOT_ID]
    if len(begins) == 1:
        return FoundSnapshot(snapshot_id=begins[0])
    if begins:
        raise RunNotFound(f"{reference}: {len(begins)} snapshots begin so: {', '.join(begins)}")
    try:
        opened = find_run(store, reference).state.opened
    except RunNotFound as missing:
        listed = ", ".join(name[:12] for name in snapshots[:_MOST_LISTED]) or "none"
        raise RunNotFound(f"no snapshot {reference!r}, and {missing}; snapshots here: {listed}") from missing
    assert opened is not None
    block_size = stored_value(opened.config, "model", "block_size", int) or 0
    data = DataConfig.model_validate(opened.config.get("data"))
    return FoundSnapshot(snapshot_id=opened.data_snapshot, run_id=reference, block_size=block_size, data=data)


def _summarize_windows(
    files: data_snapshot.SnapshotFiles, spans: list[tuple[int, TokenSpan]], found: FoundSnapshot
) -> Iterator[WindowSummary]:
    text = files.path(data_snapshot.TOKENIZER).read_text(encoding="utf-8")
    tokenizer = foreign_tokenizer.parse_tokenizer(text, files.manifest.end_of_text_id)
    is_weighted = found.data is None or bool(found.data.weights)
    places = snapshot_manifest.documents_between(files.path(data_snapshot.DOCUMENTS), [span for _, span in spans])
    for (window, span), documents in zip(spans, places, strict=True):
        split, first = span.split, span.start
        ends = tuple(accumulate(group.tokens(split) for group in files.manifest.known_groups))
        sides = zip(files.manifest.known_groups, (0, *ends[:-1]), ends, strict=False)
        groups = tuple(group.name for group, start, stop in sides if start < min(span.stop + 1, stop) and first < stop)
        tokens = np.concatenate(list(token_shard.slices_between(files.shards(split), first, span.stop)))
        yield WindowSummary(
            split=split,
            window=window,
            first_token=first,
            text=tokenizer.decode(tokens.tolist()),
            documents=tuple(documents),
            groups=groups,
            is_drawn=split == "val" or len(groups) < 2 or not is_weighted,
        )


def _choose_windows(
    manifest: SnapshotManifest, window_counts: Mapping[str, int], choice: WindowChoice, block_size: int
) -> list[tuple[int, TokenSpan]]:
    """Return the number and the place of each window to show."""

    def place(split: SplitName, window: int) -> tuple[int, TokenSpan]:
        count = window_counts[split]
        start = int(token_windows.first_tokens(np.array([window]), window_count=count, block_size=block_size)[0])
        return window, TokenSpan(split=split, start=start, stop=start + block_size)

    if choice.window is None:
        middle, last = window_counts["train"] // 2, window_counts["train"] - 1
        chosen: list[tuple[SplitName, int]] = [*(("train", it) for it in sorted({0, middle, last})), ("val", 0)]
        return [place(split, window) for split, window in chosen if 0 <= window < window_counts[split]]
    count = window_counts[choice.split]
    later = count * block_size  # those of later epochs; none goes past the end of the text
    last = manifest.split(choice.split).tokens - 1 - block_size
    if not 0 <= choice.window < later or place(choice.split, choice.window)[1].start > last:
        raise InvalidConfiguration(
            f"--window {choice.window}: {choice.split} has windows 0 to {count - 1} of {block_size} tokens, and of "
            f"later epochs those up to {later - 1} that begin at token {last} or before"
        )
    return [place(choice.split, choice.window)]


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
