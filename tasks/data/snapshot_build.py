"""Builds a data snapshot: check, survey, train the tokenizer, tokenize in parts, assemble, publish; survives a kill."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import pyarrow as pa

from cairn.model.configuration.data import SMALLEST_BPE_VOCABULARY, DataConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import InvalidInput
from cairn.storage.errors import SnapshotDamaged, restated
from cairn.storage.snapshots import data_snapshot, snapshot_manifest, token_shard
from cairn.storage.stores import child_process, codec
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.data import document, rejection, snapshot_lookup, snapshot_writer, text_ranges
from cairn.tasks.data.corpus import open_corpus
from cairn.tasks.data.document import InvalidCorpus, Source, Survey, survey_corpus
from cairn.tasks.data.encoding_process import EncodingProcess, return_freed_memory
from cairn.tasks.data.foreign_tokenizer import local_file, read_tokenizer
from cairn.tasks.data.snapshot_writer import FinishedParts, PartEncoder, count_batches
from cairn.tasks.data.text_ranges import TextRange

_SURVEY = "survey.json"
FAST_FROM_BYTES = 32 << 20
"""From so much text on, the fast encoder saves more than its probe takes."""


class BuildStage(StrEnum):
    """The stages of a build, in this order."""

    CHECKING = "checking"
    SURVEYING = "surveying"
    TOKENIZING = "tokenizing"
    WRITING = "writing"


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildProgress:
    """Bytes done and in all in this stage, and documents so far; bytes of files in the first stage, then of text."""

    stage: BuildStage
    bytes_done: int
    bytes_total: int
    documents: int


ProgressListener = Callable[[BuildProgress], None]


def build_snapshot(
    store: ObjectStore,
    data: DataConfig,
    base_dir: Path,
    *,
    cache_dir: Path | None = None,
    on_progress: ProgressListener = lambda progress: None,
) -> snapshot_lookup.SnapshotReference:
    """Return the snapshot of `data`, and build it unless its recipe is known; relative paths start at `base_dir`.

    A `snapshot:` source is only looked up. A killed build leaves its parts in `cache_dir`. Raises InvalidCorpus for
    unusable text or settings, and IntegrityError if the store has other bytes.
    """
    if data.snapshot:
        return snapshot_lookup.find_by_id(store, data.snapshot)
    build = _Build(data, base_dir, on_progress)
    recipe = snapshot_lookup.make_recipe(data, build.sources, build.tokenizer)
    if known := snapshot_lookup.find_by_recipe(store, recipe):
        bad = {item.kind: item.documents for item in known.manifest.rejected if item.kind not in rejection.LEFT_OUT}
        documents = known.manifest.splits.train.documents + known.manifest.splits.val.documents
        where = ", ".join(f"{number} {kind}" for kind, number in bad.items())
        document.require_few_rejected(sum(bad.values()), documents, data.max_rejected_fraction, where)
        document.require_few_unknown(known.unknown_bytes, known.text_bytes, data.max_rejected_fraction, "")
        return replace(known, turned_off=build.turned_off)
    return_freed_memory()
    with build_folder(cache_dir, snapshot_lookup.recipe_id(recipe)) as folder:
        snapshot_id, manifest = data_snapshot.publish_snapshot(store, folder / "snapshot", build.stage(folder, store))
        made = snapshot_lookup.SnapshotReference(
            snapshot_id=snapshot_id, manifest=manifest, unknown_bytes=build.unknown_bytes, turned_off=build.turned_off
        )
        snapshot_lookup.save_recipe(store, recipe, made)
    return made


def find_built(
    store: ObjectStore, data: DataConfig, base_dir: Path, sources: Sequence[Source]
) -> snapshot_lookup.SnapshotReference | None:
    """Return the snapshot that a build from these previewed sources would reuse; None for unchecked sources."""
    if not all(source.sha256 for source in sources):
        return None
    given = given_tokenizer(data, base_dir)
    found = snapshot_lookup.find_by_recipe(store, snapshot_lookup.make_recipe(data, sources, given))
    return replace(found, turned_off=given.turned_off) if found and given else found


def count_unknown_bytes(sources: Sequence[Source], data: DataConfig, given: Tokenizer) -> int:
    """Tokenize all of the text and return the bytes that the tokenizer does not know; raises InvalidCorpus."""
    pieces = document.read_corpus(sources, deduplicate=data.deduplicate)
    return _require_known(count_batches(PartEncoder(tokenizer=given, data=data).encode(pieces)), data)


def _require_known(parts: FinishedParts, data: DataConfig) -> int:
    most, where = data.max_rejected_fraction, f", first in {parts.first_unknown}"
    document.require_few_unknown(parts.unknown_bytes, parts.text_bytes, most, where)
    return parts.unknown_bytes


def repair_snapshot(
    store: ObjectStore, snapshot_id: str, data: DataConfig | None, base_dir: Path, *copies: Path
) -> tuple[str, ...]:
    """Build damaged objects of a snapshot again from its sources; returns their keys, those in `copies` included.

    `data` is of this machine's configuration, None without one. Raises SnapshotDamaged and changes nothing in
    the store if there is none, or if the sources are gone or different, or are the snapshot.
    """
    manifest = data_snapshot.read_manifest(store, snapshot_id)
    dropped = tuple(key for folder in copies for key in data_snapshot.drop_damaged_copies(folder, manifest))
    damaged = [item for item, _ in data_snapshot.find_damage(store, snapshot_id)]
    if not damaged:
        return tuple(dict.fromkeys(dropped))
    problem = f"data/{snapshot_id}: {', '.join(item.key for item in damaged)} damaged, and"
    if data is None:
        cause = "only the run's log names its text, which is not opened"
        raise SnapshotDamaged(f"{problem} {cause}: continue with the run's configuration file")
    if data.snapshot:
        remedy = "import it again with `cairn import-tokens`, or continue the run that built it"
        raise SnapshotDamaged(f"{problem} the run has no text to build it from: {remedy}")
    gone = restated((InvalidCorpus, InvalidInput, OSError), SnapshotDamaged, f"{problem} its sources are not available")
    with gone, child_process.temporary_folder("cairn-snapshot-") as staging:
        _Build(data, base_dir).stage(staging, store)
        for item in damaged:
            data_snapshot.replace_object(store, snapshot_id, item, staging / "snapshot" / item.key)
    return tuple(dict.fromkeys([*dropped, *(item.key for item in damaged)]))


def given_tokenizer(data: DataConfig, base_dir: Path) -> Tokenizer | None:
    """Return a given tokenizer, or None for `bpe:<size>`; raises InvalidCorpus for an unusable one."""
    spec, size, smallest, tokenizer = data.tokenizer, data.bpe_vocab_size, SMALLEST_BPE_VOCABULARY, None
    if size is None:
        rule = "bytes, bpe:<size> or a tokenizer.json"
        with restated(InvalidInput, InvalidCorpus, f"data.tokenizer = {spec!r}", rule=rule):
            path = None if spec == "bytes" else local_file("data.tokenizer", spec, base_dir)
            tokenizer = read_tokenizer(path, end_of_text=data.end_of_text) if path else Tokenizer.bytes()
            tokenizer.require_ends_kept()
        size, smallest = tokenizer.vocab_size, 2
    if not smallest <= size <= token_shard.MAX_VOCAB_SIZE:
        rule = f"from {smallest} to {token_shard.MAX_VOCAB_SIZE}"
        raise InvalidCorpus(f"data.tokenizer = {spec!r}: the vocabulary has {size} ids; rule: {rule}")
    return tokenizer


def accelerate(tokenizer: Tokenizer, sources: Sequence[Source], size_bytes: int) -> bool:
    """Whether the fast library encodes this much text until `slow_down`: where it has the same ids of these sources."""
    is_fast = size_bytes >= FAST_FROM_BYTES and tokenizer.accelerate(document.sample_texts(sources), EncodingProcess)
    return_freed_memory()
    return is_fast


class _Build:
    """One build: the sources that were checked, the given tokenizer, and the stages that come then."""

    def __init__(self, data: DataConfig, base_dir: Path, on_progress: ProgressListener = lambda progress: None) -> None:
        self._data, self._on_progress = data, on_progress
        self.tokenizer = given_tokenizer(data, base_dir)
        self.turned_off = self.tokenizer.turned_off if self.tokenizer else ()
        self.unknown_bytes = 0
        self.sources = open_corpus(data, base_dir, lambda done, total: self._report(BuildStage.CHECKING, total, done))
        # The size of the text is not known before a survey; the files' size stands for it.
        self._stored_bytes = sum(source.bytes for source in self.sources)

    def stage(self, folder: Path, store: ObjectStore) -> snapshot_manifest.SnapshotManifest:
        """Write every file of the snapshot into `folder/snapshot`, with the parts that an earlier build finished.

        With a given tokenizer that the fast library has the text is read once, and where parts are in the store never.
        """
        tokenizer, survey = self.tokenizer, None
        ranges = text_ranges.find_ranges(store, self._data, self.sources, tokenizer)
        left_bytes = sum(source.bytes for one in ranges if one.parts is None for source in one.sources)
        try:
            is_dear = bool(self._data.loss_on)  # conversations are rendered once, and encoded by the reference
            if not tokenizer or not (
                is_dear or accelerate(tokenizer, self.sources, left_bytes) or left_bytes < self._stored_bytes
            ):
                survey, tokenizer = self._survey(folder)
                accelerate(tokenizer, self.sources, survey.text_bytes)
            encoder = PartEncoder(tokenizer=tokenizer, data=self._data)
            batches = self._tokenize(folder, store, ranges, survey, encoder)
        finally:
            if tokenizer:
                tokenizer.slow_down()
        return_freed_memory()
        target = folder / "snapshot"
        shutil.rmtree(target, ignore_errors=True)  # of a build that was killed meanwhile
        target.mkdir()
        return snapshot_writer.assemble(target, batches, self.sources, encoder)

    def _tokenize(
        self, folder: Path, store: ObjectStore, ranges: Sequence[TextRange], survey: Survey | None, encoder: PartEncoder
    ) -> Iterator[pa.RecordBatch]:
        """Gather the parts of all ranges; returns their batches, which report their use. Raises InvalidCorpus."""
        total, before, paths = survey.text_bytes if survey else self._stored_bytes, 0, list[Path]()
        data = self._data

        def watch(batches: Iterator[pa.RecordBatch], done: FinishedParts) -> Iterator[pa.RecordBatch]:
            text_bytes = survey.text_bytes if survey else 0
            for batch in batches:
                done = count_batches([batch], done)
                if text_bytes > snapshot_writer.PART_BYTES:  # of much text it is refused before its end
                    where = f" so far, first in {done.first_unknown}"
                    document.require_few_unknown(done.unknown_bytes, text_bytes, data.max_rejected_fraction, where)
                yield batch
                self._report(BuildStage.TOKENIZING, total, before + done.text_bytes, done.documents)

        for one in ranges:
            place = folder / one.id
            if one.parts is None or not text_ranges.fetch_range(store, one, place, encoder.schema):
                snapshot_writer.complete_parts(place, one.sources, encoder, watch)
            paths += sorted(place.glob("part-*.arrow"))
            before += sum(source.bytes for source in one.sources)

        def rows() -> Iterator[pa.RecordBatch]:
            read = snapshot_writer.read_parts(paths, encoder.schema)
            return text_ranges.without_duplicates(read) if data.deduplicate and len(ranges) > 1 else read

        parts = count_batches(rows())
        if not survey:
            pieces = snapshot_writer.pieces_of(rows())
            require_usable(survey_corpus(self.sources, data.val_fraction, None, deduplicate=False, pieces=pieces), data)
        self.unknown_bytes = _require_known(parts, data)
        return self._count_written(parts.text_bytes, rows())

    def _survey(self, folder: Path) -> tuple[Survey, Tokenizer]:
        """Return survey and tokenizer, of an earlier build if it finished both; raises InvalidCorpus."""
        kept, data = folder / _SURVEY, self._data
        if kept.is_file():
            survey = codec.decode(kept.read_bytes(), Survey, where=str(kept))
            tokenizer = self.tokenizer or read_tokenizer(folder / data_snapshot.TOKENIZER)
            require_usable(survey, data)
            return survey, tokenizer
        sample = None if self.tokenizer else document.TextSample(data.tokenizer_bytes)

        def report(done: int, documents: int) -> None:
            self._report(BuildStage.SURVEYING, self._stored_bytes, done, documents)

        survey = survey_corpus(self.sources, data.val_fraction, sample, deduplicate=data.deduplicate, on_text=report)
        require_usable(survey, data)
        if (chosen := self.tokenizer) is None:
            assert sample is not None and data.bpe_vocab_size is not None
            where, rule = f"data.tokenizer = {data.tokenizer!r}", "the text fills the size"
            with restated(InvalidInput, InvalidCorpus, where, rule=rule):
                chosen = Tokenizer.train_bpe(sample.texts(), data.bpe_vocab_size)
        (folder / data_snapshot.TOKENIZER).write_text(chosen.json, encoding="utf-8")
        unfinished = folder / f"{_SURVEY}.unfinished"
        unfinished.write_bytes(codec.encode(survey))
        unfinished.replace(kept)
        return survey, chosen

    def _count_written(self, total: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        done = FinishedParts()
        for batch in batches:
            yield batch
            done = count_batches([batch], done)
            self._report(BuildStage.WRITING, total, done.text_bytes, done.documents)

    def _report(self, stage: BuildStage, total: int, done: int, documents: int = 0) -> None:
        done = min(done, total)
        self._on_progress(BuildProgress(stage=stage, bytes_done=done, bytes_total=total, documents=documents))


def require_usable(survey: Survey, data: DataConfig) -> None:
    """Raise InvalidCorpus where too many documents are rejected, or a split has none."""
    documents = survey.train_documents + survey.val_documents
    document.require_few_rejected(survey.rejected, documents, data.max_rejected_fraction, survey.worst)
    document.require_both_splits(survey.train_documents, survey.val_documents, data)


@contextmanager
def build_folder(cache_dir: Path | None, recipe_id: str) -> Iterator[Path]:
    """Lock the recipe's folder for this process; a temporary folder without a cache, or if it is locked already.

    The folder is removed after success and after InvalidCorpus, and stays after any other error.
    """
    with ExitStack() as stack:
        if cache_dir is None or not _lock(stack, cache_dir / "snapshots-in-work" / f"{recipe_id}.lock"):
            yield stack.enter_context(child_process.temporary_folder("cairn-snapshot-"))
            return
        folder = cache_dir / "snapshots-in-work" / recipe_id
        folder.mkdir(exist_ok=True)
        for lock in folder.parent.glob("*.lock"):
            if (other := lock.with_suffix("")) == folder or not other.is_dir():
                continue
            with ExitStack() as locked:
                if time.time() - lock.stat().st_mtime >= data_snapshot.ABANDONED_SECONDS and _lock(locked, lock):
                    shutil.rmtree(other, ignore_errors=True)
        try:
            yield folder
        except InvalidCorpus:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _lock(stack: ExitStack, path: Path) -> bool:
    """Lock the file while `stack` is open, and set its time; the system unlocks it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.utime(descriptor)
    return True
