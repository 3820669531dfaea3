"""Tokenizes documents in parallel into Arrow files of consecutive ones, which a later build uses; memory is bounded."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from model.data.tokenizer import Tokenizer
from storage.snapshots.token_shard import token_dtype
from storage.stores.local_store import fsync_path
from tasks.data.corpus_survey import remembered
from tasks.data.document import Document, Piece, Rejected, Source

_BATCH_PIECES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsDone:
    """Finished parts: `paths` hold `pieces` of `source` and every source before it."""

    paths: tuple[Path, ...]
    source: str
    pieces: int
    text_bytes: int
    documents: int


def find_finished_parts(folder: Path) -> PartsDone:
    """Return the parts in `folder`; deletes an unreadable part and those after it."""
    paths: list[Path] = []
    with suppress(pa.ArrowException):
        while (path := _part(folder, len(paths))).is_file():
            with pa.OSFile(str(path)) as file, pa.ipc.open_file(file):
                paths.append(path)
    for path in set(folder.glob("part-*.arrow")) - set(paths):
        path.unlink()
    source, pieces, text_bytes, documents = "", 0, 0, 0
    for batch in read_parts(paths):
        names = batch.column("source").to_pylist()
        last = names.count(names[-1])
        pieces = pieces + last if (source, len(names)) == (names[-1], last) else last
        source = names[-1]
        text_bytes += compute.sum(batch.column("bytes")).as_py()
        documents += batch.column("kind").null_count
    return PartsDone(paths=tuple(paths), source=source, pieces=pieces, text_bytes=text_bytes, documents=documents)


def read_remaining_pieces(sources: Sequence[Source], done: PartsDone) -> Iterator[Piece]:
    """Yield the pieces after the finished parts; an unfinished source is read from its start, to be hashed."""
    names = [source.name for source in sources]
    for source in sources[names.index(done.source) if done.paths else 0 :]:
        yield from islice(source.pieces(), done.pieces if source.name == done.source else 0, None)


def read_digests(done: PartsDone) -> set[bytes]:
    """Return what is remembered of all documents in the parts."""
    digests = (batch.column("sha256").drop_null().to_pylist() for batch in read_parts(done.paths))
    return {remembered(digest) for listed in digests for digest in listed}


def read_parts(paths: Iterable[Path]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of parts in order, one at a time in memory."""
    for path in paths:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartEncoder:
    """Makes the record batches of parts: a document has token ids, a rejected one `kind` and `detail`."""

    tokenizer: Tokenizer
    val_fraction: float

    @property
    def schema(self) -> pa.Schema:
        """The schema of a part."""
        integers, texts = dict.fromkeys(("offset_bytes", "bytes"), pa.int64()), pa.string()
        names = ("source", "offset_bytes", "bytes", "split", "sha256", "kind", "detail")
        ids = pa.large_list(pa.from_numpy_dtype(token_dtype(self.tokenizer.vocab_size)))
        return pa.schema([*((name, integers.get(name, texts)) for name in names), ("ids", ids)])

    def encode(self, pieces: Iterator[Piece], *, workers: int, batch_bytes: int) -> Iterator[pa.RecordBatch]:
        """Yield the pieces in order with their tokens; end-of-text follows each document that ends."""
        waiting: deque[Future[pa.RecordBatch]] = deque()
        with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool:
            try:
                for batch in _batches(pieces, batch_bytes):
                    waiting.append(pool.submit(self._encode_batch, batch))
                    if len(waiting) > workers:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _encode_batch(self, pieces: list[Piece]) -> pa.RecordBatch:
        documents, schema = [piece for piece in pieces if isinstance(piece, Document)], self.schema
        ids, lengths = self.tokenizer.encode_flat([document.text for document in documents])
        ends = np.array([document.ends for document in documents], dtype=bool)
        # After the last document too, so that no window joins two texts without a mark.
        ids = np.insert(ids, np.cumsum(lengths)[ends], self.tokenizer.end_of_text_id)
        kept = iter((lengths + ends).tolist())
        counts = [next(kept) if isinstance(piece, Document) else 0 for piece in pieces]
        columns = zip(*map(self._row, pieces), strict=True)
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=False)]
        offsets = pa.array(np.concatenate(([0], np.cumsum(counts, dtype=np.int64))))
        values = ids.astype(schema.field("ids").type.value_type.to_pandas_dtype(), copy=False)
        return pa.record_batch([*arrays, pa.LargeListArray.from_arrays(offsets, pa.array(values))], schema=schema)

    def _row(self, piece: Piece) -> tuple[str, int, int, str | None, str | None, str | None, str | None]:
        if isinstance(piece, Rejected):
            return piece.source, piece.offset_bytes, 0, None, None, piece.kind.value, piece.detail
        split = piece.split(self.val_fraction)
        return piece.source, piece.offset_bytes, piece.bytes, split, piece.sha256, None, None


def write_parts(
    folder: Path, first: int, batches: Iterator[pa.RecordBatch], schema: pa.Schema, *, part_bytes: int
) -> None:
    """Write the batches as parts from number `first` on."""
    number, batch = first, next(batches, None)
    while batch is not None:
        size_bytes, unfinished = 0, _part(folder, number).with_suffix(".unfinished")
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            while batch is not None and size_bytes < part_bytes:
                writer.write_batch(batch)
                size_bytes += compute.sum(batch.column("bytes")).as_py()
                batch = next(batches, None)
        fsync_path(unfinished)
        os.replace(unfinished, _part(folder, number))
        number += 1


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.arrow"


def _batches(pieces: Iterator[Piece], batch_bytes: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size_bytes = 0
    for piece in pieces:
        batch.append(piece)
        size_bytes += piece.bytes if isinstance(piece, Document) else 0
        if size_bytes >= batch_bytes or len(batch) == _BATCH_PIECES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
