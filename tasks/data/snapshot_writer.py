"""Tokenizes documents in parallel into Arrow files of consecutive ones, and writes a snapshot's files from them.

A later build uses the parts that a killed one finished; memory is bounded.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
from numpy.typing import NDArray

from cairn.model.configuration.data import DataConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.storage.snapshots import snapshot_manifest, token_shard
from cairn.storage.snapshots.data_snapshot import ANSWERS, DOCUMENTS, REJECTED, TOKENIZER
from cairn.storage.snapshots.snapshot_manifest import SPLITS, SnapshotGroup, SnapshotManifest, SnapshotSource, SplitName
from cairn.storage.stores import local_store, object_store
from cairn.tasks.data.conversation import encode_documents
from cairn.tasks.data.document import Document, InvalidCorpus, Piece, Source, read_corpus

_COLUMNS = [field.name for field in fields(snapshot_manifest.DocumentRow)]
_REJECTED_COLUMNS = [field.name for field in fields(snapshot_manifest.RejectedRow)]
_PIECE_COLUMNS = ("source", "offset_bytes", "kind", "detail", "bytes", "split", "sha256", "ends")
_BATCH_PIECES = 4096
BATCH_BYTES = 1 << 20
PART_BYTES = 64 << 20
"""How much a kill repeats."""
WORKERS = 2
"""Each batch uses all cores; the second one keeps them busy between batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedParts:
    """The content of parts; `first_unknown` is where the text is that the tokenizer does not know."""

    pieces: int = 0
    text_bytes: int = 0
    documents: int = 0
    unknown_bytes: int = 0
    first_unknown: str = ""


Watch: TypeAlias = Callable[[Iterator[pa.RecordBatch], FinishedParts], Iterator[pa.RecordBatch]]


def complete_parts(
    folder: Path, sources: Sequence[Source], encoder: "PartEncoder", watch: Watch = lambda batches, done: batches
) -> None:
    """Write the parts of sources that an earlier process did not finish; `watch` gets the batches and what is done.

    Deletes a part that is unreadable, or another version's, and those after it.
    """
    folder.mkdir(exist_ok=True)
    finished, schema = list[Path](), encoder.schema
    with suppress(pa.ArrowException):
        while (path := part_path(folder, len(finished))).is_file():
            with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as part:
                if part.schema != schema:
                    break
                finished.append(path)
    for path in set(folder.glob("part-*.arrow")) - set(finished):
        path.unlink()
    done = count_batches(read_parts(finished, schema))
    # All of the text is read again, to be hashed; only the rest after the finished parts is tokenized.
    pieces = read_corpus(sources, deduplicate=encoder.data.deduplicate)
    write_parts(folder, len(finished), watch(encoder.encode(islice(pieces, done.pieces, None)), done), schema)


def count_batches(batches: Iterable[pa.RecordBatch], found: FinishedParts = FinishedParts()) -> FinishedParts:
    """Return what is in the batches of parts, added to what was found before."""
    for batch in batches:
        size_bytes, unknown = (compute.sum(batch.column(name)).as_py() for name in ("bytes", "unknown"))
        first_unknown = found.first_unknown
        if unknown and not first_unknown:
            row = compute.greater(batch.column("unknown"), 0).index(True).as_py()
            first_unknown = f"{batch.column('source')[row]}, offset {batch.column('offset_bytes')[row]}"
        found = FinishedParts(
            pieces=found.pieces + batch.num_rows,
            text_bytes=found.text_bytes + size_bytes,
            documents=found.documents + batch.column("kind").null_count,
            unknown_bytes=found.unknown_bytes + unknown,
            first_unknown=first_unknown,
        )
    return found


def _rows(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def read_parts(paths: Iterable[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the batches of parts in order, one at a time in memory."""
    for path in paths:
        yield from token_shard.read_batches(path, schema, where=str(path))


def pieces_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Piece]:
    """Yield the pieces that the batches of parts were made of, without their text."""
    for batch in batches:
        for source, offset, kind, detail, size, split, digest, ends in _rows(batch.select(_PIECE_COLUMNS)):
            if kind is not None:
                yield snapshot_manifest.RejectedRow(source=source, offset_bytes=offset, kind=kind, detail=detail)
            else:
                yield Document(
                    source=source, offset_bytes=offset, text="", bytes=size, sha256=digest, placed=split, ends=ends
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartEncoder:
    """Makes the record batches of parts: a document has token ids, a rejected one `kind` and `detail`.

    Of conversations they also say of each token whether it is an answer's.
    """

    tokenizer: Tokenizer
    data: DataConfig

    @property
    def schema(self) -> pa.Schema:
        """The schema of a part."""
        others = {**dict.fromkeys(("offset_bytes", "bytes", "unknown"), pa.int64()), "ends": pa.bool_()}
        names = ("source", "offset_bytes", "bytes", "split", "sha256", "ends", "kind", "detail", "unknown")
        ids = pa.large_list(pa.from_numpy_dtype(token_shard.token_dtype(self.tokenizer.vocab_size)))
        answers = [("answers", pa.large_list(pa.bool_()))] * bool(self.data.loss_on)
        return pa.schema([*((name, others.get(name, pa.string())) for name in names), ("ids", ids), *answers])

    def encode(self, pieces: Iterator[Piece]) -> Iterator[pa.RecordBatch]:
        """Yield the pieces in order with their tokens; end-of-text follows each document that ends."""
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="encode") as pool:
            yield from object_store.map_ahead(pool, self._encode_batch, _batches(pieces), most=WORKERS)

    def _encode_batch(self, pieces: list[Piece]) -> pa.RecordBatch:
        documents, schema = [piece for piece in pieces if isinstance(piece, Document)], self.schema
        ids, lengths, answers = encode_documents(self.tokenizer, documents, has_answers=bool(self.data.loss_on))
        is_kept = np.array([isinstance(piece, Document) for piece in pieces], dtype=bool)
        unknown, counts = np.zeros(len(pieces), dtype=np.int64), np.zeros(len(pieces), dtype=np.int64)
        unknown[is_kept] = self.tokenizer.count_unknown([document.text for document in documents], ids, lengths)
        # After the last document too, so that no window joins two texts without a mark; a template may have written it.
        ends, places = np.array([document.ends for document in documents], dtype=bool), np.cumsum(lengths)
        if self.data.loss_on:
            ends[lengths > 0] &= ids[places[lengths > 0] - 1] != self.tokenizer.end_of_text_id
        is_answer = np.array([any(stop > len(one.text) for _, stop in one.answers) for one in documents], dtype=bool)
        answers = np.insert(answers, places[ends], is_answer[ends])
        ids = np.insert(ids, places[ends], self.tokenizer.end_of_text_id)
        counts[is_kept] = lengths + ends
        columns = [*zip(*map(self._row, pieces), strict=True), unknown]
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=False)]
        offsets = pa.array(np.concatenate(([0], np.cumsum(counts))))
        values = ids.astype(schema.field("ids").type.value_type.to_pandas_dtype(), copy=False)
        lists = (pa.LargeListArray.from_arrays(offsets, pa.array(one)) for one in (values, answers))
        arrays += islice(lists, 2 if self.data.loss_on else 1)
        return pa.record_batch(arrays, schema=schema)

    def _row(self, piece: Piece) -> tuple[str, int, int, str | None, str | None, bool, str | None, str | None]:
        if isinstance(piece, snapshot_manifest.RejectedRow):
            return piece.source, piece.offset_bytes, 0, None, None, False, str(piece.kind), piece.detail
        split = piece.split(self.data.val_fraction)
        return piece.source, piece.offset_bytes, piece.bytes, split, piece.sha256, piece.ends, None, None


def write_parts(folder: Path, first: int, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
    """Write the batches as parts from number `first` on."""
    number, batch = first, next(batches, None)
    while batch is not None:
        size_bytes, unfinished = 0, part_path(folder, number).with_suffix(".unfinished")
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            while batch is not None and size_bytes < PART_BYTES:
                writer.write_batch(batch)
                size_bytes += compute.sum(batch.column("bytes")).as_py()
                batch = next(batches, None)
        local_store.fsync_path(unfinished)
        os.replace(unfinished, part_path(folder, number))
        number += 1


def part_path(folder: Path, number: int) -> Path:
    """Return the path of a part."""
    return folder / f"part-{number:06d}.arrow"


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size_bytes = 0
    for piece in pieces:
        batch.append(piece)
        size_bytes += piece.bytes if isinstance(piece, Document) else 0
        if size_bytes >= BATCH_BYTES or len(batch) == _BATCH_PIECES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


class SnapshotWriter:
    """Context manager over the open files of a snapshot, which counts their content."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._shards, self._masks = dict[str, token_shard.ShardWriter](), dict[str, token_shard.ShardWriter]()
        self._answers, self.inner_ends = Counter[str](), 0
        self._stack = ExitStack()
        self._rejects: snapshot_manifest.RowWriter | None = None
        self._rejected = Counter[str]()
        self.sizes = {split: Counter(documents=0, tokens=0, bytes=0) for split in SPLITS}

    def __enter__(self) -> "SnapshotWriter":
        (self._folder / TOKENIZER).write_bytes(self._tokenizer.json.encode("utf-8"))
        self._index = self._stack.enter_context(snapshot_manifest.RowWriter(self._folder / DOCUMENTS))
        schema = token_shard.ShardSchema(tokenizer_sha256=self._tokenizer.sha256, vocab_size=self._tokenizer.vocab_size)
        open_shard = partial(token_shard.ShardWriter, self._folder, shard_tokens=token_shard.DEFAULT_SHARD_TOKENS)
        for split in SPLITS:
            self._shards[split] = self._stack.enter_context(open_shard(split, schema=schema))
            mask = open_shard(f"{ANSWERS}{split}", schema=replace(schema, is_mask=True))
            self._masks[split] = self._stack.enter_context(mask)  # writes no file without answers
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def add_tokens(self, split: SplitName, tokens: NDArray[Any]) -> None:
        """Append tokens (N,) to a split; raises StorageError for an id outside the vocabulary."""
        self._shards[split].append(tokens)

    def add_answers(self, split: SplitName, is_answer: NDArray[np.bool_]) -> None:
        """Append to a split which of its tokens (N,) are an answer's."""
        self._masks[split].append(is_answer)
        self._answers[split] += int(is_answer.sum())

    def add_documents(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Append documents to the index, each as the values of a DocumentRow; their tokens are added separately."""
        self._index.extend(rows)
        for split in SPLITS:
            sizes = [(tokens, size_bytes) for _, _, size_bytes, tokens, found, _ in rows if found == split]
            tokens, size_bytes = sum(count for count, _ in sizes), sum(size for _, size in sizes)
            self.sizes[split].update(documents=len(sizes), tokens=tokens, bytes=size_bytes)

    def add_rejected(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Append rejected documents, each as the values of a RejectedRow; the file exists only if there are some."""
        if rows and self._rejects is None:
            writer = snapshot_manifest.RowWriter(self._folder / REJECTED, snapshot_manifest.REJECTED_SCHEMA)
            self._rejects = self._stack.enter_context(writer)
        if self._rejects is not None:
            self._rejects.extend(rows)
        self._rejected.update(kind for _, _, kind, _ in rows)

    def manifest(
        self, sources: Iterable[SnapshotSource], *, val_fraction: float, groups: tuple[SnapshotGroup, ...] = ()
    ) -> SnapshotManifest:
        """Return the manifest without objects."""
        train, val = (snapshot_manifest.SplitSize(**self.sizes[split]) for split in SPLITS)
        answers: snapshot_manifest.SnapshotAnswers | msgspec.UnsetType = msgspec.UNSET
        if self._answers:
            counts = {f"{split}_tokens": self._answers[split] for split in SPLITS}
            if not all(counts.values()):
                rule = "answers in train and val have text"
                raise InvalidCorpus(f"data.loss_on: no token of a split is an answer's; rule: {rule}")
            answers = snapshot_manifest.SnapshotAnswers(**counts, inner_ends=self.inner_ends)
        counted = sorted(self._rejected.items())
        rejected = (snapshot_manifest.RejectedCount(kind=kind, documents=number) for kind, number in counted)
        return SnapshotManifest(
            version=snapshot_manifest.SNAPSHOT_VERSION,
            tokenizer_sha256=self._tokenizer.sha256,
            vocab_size=self._tokenizer.vocab_size,
            end_of_text_id=self._tokenizer.end_of_text_id,
            val_fraction=val_fraction,
            splits=snapshot_manifest.SnapshotSplits(train=train, val=val),
            sources=tuple(sources),
            rejected=tuple(rejected),
            groups=groups or msgspec.UNSET,
            answers=answers,
        )


def _count_inner_ends(batch: pa.RecordBatch, end_of_text_id: int) -> int:
    """Return the end marks within conversations; InvalidCorpus for others, and for a document that ends without one."""
    ids, ends = batch.column("ids"), batch.column("ends").to_numpy(zero_copy_only=False)
    marks, last = np.flatnonzero(ids.values.to_numpy() == end_of_text_id), ids.offsets.to_numpy()[1:][ends] - 1
    inner, has_answers, where = len(marks) - len(last), "answers" in batch.schema.names, batch.column("source")[0]
    if has_answers and not batch.column("answers").offsets.equals(ids.offsets):
        raise InvalidCorpus(f"data.sources: {where}: a part has other answers than tokens; delete it")
    if not np.isin(last, marks).all() or (inner and not has_answers):
        problem = f"{len(marks)} end marks for {ends.sum()} documents"
        rule = "one each, at its end. Take another data.tokenizer"
        raise InvalidCorpus(f"data.sources: {where}: {problem}; rule: {rule}")
    return inner


def assemble(
    folder: Path, batches: Iterable[pa.RecordBatch], sources: Sequence[Source], encoder: PartEncoder
) -> SnapshotManifest:
    """Write the batches of an encoder's parts as a snapshot into `folder`; returns its manifest without objects."""
    documents, tokens = Counter[str](), Counter[tuple[str, SplitName]]()
    group_of = {source.name: source.group for source in sources}
    with SnapshotWriter(folder, encoder.tokenizer) as writer:
        for batch in batches:
            ids = batch.column("ids")
            counts = np.diff(ids.offsets.to_numpy())
            writer.inner_ends += _count_inner_ends(batch, encoder.tokenizer.end_of_text_id)
            splits = batch.column("split").to_numpy(zero_copy_only=False)
            for split in SPLITS:
                chosen = np.repeat(splits == split, counts)
                writer.add_tokens(split, ids.values.to_numpy()[chosen])
                if encoder.data.loss_on:
                    writer.add_answers(split, batch.column("answers").values.to_numpy(zero_copy_only=False)[chosen])
            is_kept = batch.column("kind").is_null()
            writer.add_rejected(_rows(batch.select(_REJECTED_COLUMNS).filter(compute.invert(is_kept))))
            rows = _rows(batch.append_column("tokens", pa.array(counts)).select(_COLUMNS).filter(is_kept))
            writer.add_documents(rows)
            documents.update(row[0] for row in rows)
            for source, _, _, count, split, _ in rows:
                tokens[group_of[source], split] += count
    listed = (
        SnapshotSource(name=one.name, bytes=one.bytes, sha256=one.sha256, unit=one.unit, documents=documents[one.name])
        for one in sources
    )
    groups = list[SnapshotGroup]()
    for name, number in Counter(filter(None, group_of.values())).items():
        train, val = (tokens[name, split] for split in SPLITS)
        groups.append(SnapshotGroup(name=name, sources=number, train_tokens=train, val_tokens=val))
    return writer.manifest(listed, val_fraction=encoder.data.val_fraction, groups=tuple(groups))
