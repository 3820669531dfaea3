"""From text to a data snapshot: check, survey, learn the tokenizer from train, encode in parts, assemble, publish.

Owns the order of that work and what of it survives a kill: the survey, the tokenizer and every finished part. Refuses
to know the orchestrator.
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as compute

from model.configuration.data import DataConfig
from model.data.tokenizer import Tokenizer
from model.errors import InvalidInput
from storage.errors import SnapshotDamaged
from storage.snapshots.data_snapshot import (
    TOKENIZER,
    SnapshotManifest,
    SplitName,
    damaged_objects,
    drop_damaged_copies,
    publish_snapshot,
    read_manifest,
    replace_object,
)
from storage.snapshots.token_shard import DEFAULT_SHARD_TOKENS, MAX_VOCAB_SIZE
from storage.stores.document import decode, encode
from storage.stores.object_store import ObjectStore
from tasks.data.build_folder import build_folder
from tasks.data.build_progress import BuildProgress, BuildStage, ProgressListener, unheard
from tasks.data.corpus import open_corpus
from tasks.data.corpus_survey import Survey, TextSample, require_few_rejected, survey_corpus, without_duplicates
from tasks.data.document import InvalidCorpus, RejectionKind, Source
from tasks.data.document_reader import ReadingRules
from tasks.data.document_split import require_both_splits
from tasks.data.snapshot_assembly import assemble, shard_schema
from tasks.data.snapshot_choice import chosen_snapshot
from tasks.data.snapshot_recipe import SnapshotReference as SnapshotReference
from tasks.data.snapshot_recipe import keep_recipe, known_snapshot, recipe_id, recipe_of
from tasks.data.source_weights import weighted_components
from tasks.data.token_parts import (
    BATCH_BYTES,
    PART_BYTES,
    WORKERS,
    encoded_batches,
    finished_parts,
    part_batches,
    part_schema,
    pieces_left,
    seen_in,
    write_parts,
)

SMALLEST_VOCABULARY = 257
SURVEY = "survey.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workshop:
    """How a snapshot is made, none of which decides its bytes.

    ``workers`` batches of ``batch_bytes`` of text are encoded at once; ``part_bytes`` of text are repeated at most by
    the next try after a kill; ``on_progress`` is told how far it has come.
    """

    workers: int = WORKERS
    batch_bytes: int = BATCH_BYTES
    part_bytes: int = PART_BYTES
    on_progress: ProgressListener = unheard


USUAL_WORKSHOP = Workshop()


def build_snapshot(
    store: ObjectStore,
    data: DataConfig,
    base_dir: Path,
    *,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    cache_dir: Path | None = None,
    workshop: Workshop = USUAL_WORKSHOP,
) -> SnapshotReference:
    """Return the snapshot of ``data``, building it unless its recipe is known; relative paths start at ``base_dir``.

    Of ``data.weights`` only that there are some matters: then the documents of each source lie together, the sources
    in the order of their names (`DataConfig.source_names`). A ``snapshot:`` source is looked up and never built. With
    a ``cache_dir`` a killed build leaves its finished parts there for the next. Raises InvalidCorpus for text or
    settings that cannot be used, IntegrityError when the store keeps other bytes than it was given.
    """
    if data.snapshot:
        return chosen_snapshot(store, data.snapshot)
    work = _work(data, base_dir, shard_tokens, workshop)
    recipe = recipe_of(data, work.sources, _tokenizer_name(data, work.tokenizer), shard_tokens)
    known = known_snapshot(store, recipe)
    if known:
        _require_few_rejected(known.manifest, data)
        return known
    with build_folder(cache_dir, recipe_id(recipe)) as folder:
        snapshot_id, manifest = publish_snapshot(store, folder / "snapshot", _stage(folder, work))
        keep_recipe(store, recipe, snapshot_id)
    return SnapshotReference(snapshot_id=snapshot_id, manifest=manifest, reused=False)


def find_built(
    store: ObjectStore, data: DataConfig, base_dir: Path, sources: Sequence[Source]
) -> SnapshotReference | None:
    """Return what building from these sources, as `preview_corpus` gives them, would find made; None: it would build.

    Sources of more text than is read through for a preview have no hash yet: None, too.
    """
    if not all(source.sha256 for source in sources):
        return None
    tokenizer = _given_tokenizer(data.tokenizer, base_dir)
    return known_snapshot(store, recipe_of(data, sources, _tokenizer_name(data, tokenizer), DEFAULT_SHARD_TOKENS))


def repair_snapshot(store: ObjectStore, snapshot_id: str, data: DataConfig, base_dir: Path, cache_dir: Path) -> int:
    """Make damaged objects of a snapshot anew from its sources; returns how many, copies in `cache_dir` included.

    Raises `SnapshotDamaged` where the sources are gone or give other bytes now, or where the snapshot itself is the
    source: then nothing was changed.
    """
    manifest = read_manifest(store, snapshot_id)
    dropped = drop_damaged_copies(cache_dir, manifest)
    damaged = damaged_objects(store, snapshot_id)
    if not damaged:
        return dropped
    if data.snapshot:
        names = ", ".join(item.key for item in damaged)
        raise SnapshotDamaged(
            f"data/{snapshot_id}: {names} damaged, and this run knows no text to make it anew from: import it again "
            "with `cairn import-tokens`, or train on its text again the run it was built for"
        )
    try:
        with tempfile.TemporaryDirectory(prefix="cairn-snapshot-") as staging:
            _stage(Path(staging), _work(data, base_dir, DEFAULT_SHARD_TOKENS, USUAL_WORKSHOP))
            for item in damaged:
                replace_object(store, snapshot_id, item, Path(staging) / "snapshot" / item.key)
    except (InvalidCorpus, InvalidInput, OSError) as error:
        names = ", ".join(item.key for item in damaged)
        why = f"{names} damaged, and its sources are not at hand: {error}"
        raise SnapshotDamaged(f"data/{snapshot_id}: {why}") from error
    return dropped + len(damaged)


def check_block_size(manifest: SnapshotManifest, block_size: int, data: DataConfig) -> None:
    """Refuse a block_size that leaves a split, or a weighted source, without a window of its own (InvalidCorpus)."""
    splits: tuple[SplitName, ...] = ("train", "val")
    name = min(splits, key=lambda split: manifest.split(split).tokens)
    tokens = manifest.split(name).tokens
    if block_size + 1 > tokens:
        raise InvalidCorpus(
            f"model.block_size = {block_size}: the {name} split has {tokens} tokens; rule: block_size is at most "
            f"{tokens - 1}, one less than the tokens of each split. Lower model.block_size or add text to data.sources"
        )
    weighted_components(manifest, data, block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    data: DataConfig
    sources: tuple[Source, ...]
    tokenizer: Tokenizer | None
    shard_tokens: int
    workshop: Workshop


def _work(data: DataConfig, base_dir: Path, shard_tokens: int, workshop: Workshop) -> _Work:
    tokenizer = _given_tokenizer(data.tokenizer, base_dir)
    rules = ReadingRules(text_field=data.text_field, max_document_bytes=data.max_document_bytes)
    heard = _Heard(workshop.on_progress, BuildStage.CHECKING, 0)
    groups = data.source_names if data.weights else ()
    sources = open_corpus(data.sources, base_dir, rules, heard.files, groups=groups)
    return _Work(data=data, sources=sources, tokenizer=tokenizer, shard_tokens=shard_tokens, workshop=workshop)


class _Heard:
    """Counts bytes and documents of one stage and tells the listener."""

    def __init__(
        self, listener: ProgressListener, stage: BuildStage, bytes_total: int, done: int = 0, documents: int = 0
    ) -> None:
        self._listener, self._stage, self._total = listener, stage, bytes_total
        self._done, self._documents = done, documents

    def files(self, bytes_done: int, bytes_total: int) -> None:
        self._total = bytes_total
        self.text(bytes_done, 0)

    def text(self, bytes_done: int, documents: int) -> None:
        self._done, self._documents = bytes_done, documents
        self._listener(
            BuildProgress(
                stage=self._stage,
                bytes_done=min(bytes_done, self._total),
                bytes_total=self._total,
                documents=documents,
            )
        )

    def batch(self, batch: pa.RecordBatch) -> None:
        more = compute.sum(batch.column("bytes")).as_py()
        self.text(self._done + more, self._documents + batch.column("kind").null_count)


def _tokenizer_name(data: DataConfig, given: Tokenizer | None) -> str:
    return f"sha256:{given.sha256}" if given else data.tokenizer


def _given_tokenizer(spec: str, base_dir: Path) -> Tokenizer | None:
    """Return the tokenizer that needs no training, or None for ``bpe:<size>``; refuse sizes no shard can hold."""
    kind, _, size = spec.partition(":")
    if kind == "bpe" and size.isdigit():
        _require_vocabulary(spec, int(size))
        return None
    try:
        tokenizer = Tokenizer.bytes() if spec == "bytes" else Tokenizer.from_file(base_dir / Path(spec).expanduser())
    except InvalidInput as error:
        raise InvalidCorpus(
            f"data.tokenizer = {spec!r}: {error}; rule: bytes, bpe:<size> or a tokenizer.json"
        ) from error
    _require_vocabulary(spec, tokenizer.vocab_size)
    return tokenizer


def _require_vocabulary(spec: str, size: int) -> None:
    # A tokenizer.json may have fewer ids than bytes, and still be right for its text; only bpe must hold every byte.
    smallest = SMALLEST_VOCABULARY if spec.startswith("bpe:") else 2
    if not smallest <= size <= MAX_VOCAB_SIZE:
        raise InvalidCorpus(
            f"data.tokenizer = {spec!r}: the vocabulary has {size} ids; rule: from {smallest} to {MAX_VOCAB_SIZE}"
        )


def _stage(folder: Path, work: _Work) -> SnapshotManifest:
    """Write every file of the snapshot into ``folder / "snapshot"``; what an earlier try finished is not done again."""
    survey, tokenizer = _surveyed(folder, work)
    _write_parts(folder, work, survey, tokenizer)
    done = finished_parts(folder)
    target = folder / "snapshot"
    shutil.rmtree(target, ignore_errors=True)  # of a try that was killed while it assembled
    target.mkdir()
    return assemble(
        target,
        part_batches(done.paths),
        work.sources,
        tokenizer,
        val_fraction=work.data.val_fraction,
        shard_tokens=work.shard_tokens,
        on_batch=_Heard(work.workshop.on_progress, BuildStage.WRITING, survey.text_bytes).batch,
    )


def _surveyed(folder: Path, work: _Work) -> tuple[Survey, Tokenizer]:
    """Return survey and tokenizer, from an earlier try if it had both; refuse a corpus that cannot be used."""
    kept = folder / SURVEY
    if kept.is_file():
        survey, tokenizer = decode(kept.read_bytes(), Survey, where=str(kept)), _kept_tokenizer(folder)
        _require_usable(survey, work.data)
        return survey, tokenizer
    sample = None if work.tokenizer else TextSample(work.data.tokenizer_bytes)
    # How much text there is becomes known here; until then the files' size stands for it.
    heard = _Heard(work.workshop.on_progress, BuildStage.SURVEYING, sum(source.bytes for source in work.sources))
    survey = survey_corpus(
        work.sources, work.data.val_fraction, sample, deduplicate=work.data.deduplicate, on_bytes=heard.text
    )
    _require_usable(survey, work.data)
    tokenizer = work.tokenizer or _trained_tokenizer(sample, work.data)
    (folder / TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")
    unfinished = folder / f"{SURVEY}.unfinished"
    unfinished.write_bytes(encode(survey))
    unfinished.replace(kept)
    return survey, tokenizer


def _kept_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(folder / TOKENIZER)


def _require_usable(survey: Survey, data: DataConfig) -> None:
    documents = survey.train_documents + survey.val_documents
    where = f"{survey.worst_documents} of them {survey.worst_kind} in {survey.worst_source}"
    require_few_rejected(survey.rejected, documents, data.max_rejected_fraction, where)
    require_both_splits(survey.train_documents, survey.val_documents, data.val_fraction)


def _require_few_rejected(manifest: SnapshotManifest, data: DataConfig) -> None:
    bad = {item.kind: item.documents for item in manifest.rejected if item.kind != RejectionKind.DUPLICATE}
    documents = manifest.splits.train.documents + manifest.splits.val.documents
    where = ", ".join(f"{number} {kind}" for kind, number in bad.items())
    require_few_rejected(sum(bad.values()), documents, data.max_rejected_fraction, where)


def _trained_tokenizer(sample: TextSample | None, data: DataConfig) -> Tokenizer:
    texts = sample.texts() if sample else iter(())
    try:
        return Tokenizer.train_bpe(texts, int(data.tokenizer.partition(":")[2]))
    except InvalidInput as error:
        raise InvalidCorpus(f"data.tokenizer = {data.tokenizer!r}: {error}; rule: the text fills the size") from error


def _write_parts(folder: Path, work: _Work, survey: Survey, tokenizer: Tokenizer) -> None:
    done, workshop = finished_parts(folder), work.workshop
    schema = part_schema(shard_schema(tokenizer).dtype)
    pieces = pieces_left(work.sources, done)
    if work.data.deduplicate:
        pieces = without_duplicates(pieces, seen_in(done))
    batches = encoded_batches(
        pieces,
        tokenizer,
        work.data.val_fraction,
        schema,
        workers=workshop.workers,
        batch_bytes=workshop.batch_bytes,
    )
    heard = _Heard(workshop.on_progress, BuildStage.TOKENIZING, survey.text_bytes, done.text_bytes, done.documents)
    write_parts(folder, len(done.paths), batches, schema, part_bytes=workshop.part_bytes, on_batch=heard.batch)
