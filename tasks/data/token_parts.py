"""Documents become tokens, in parallel and in order, in parts that a later try finds finished.

Owns the pipeline and its parts: a part is an Arrow file of consecutive documents with their tokens, and is there whole
or not at all. Memory is a few batches, whatever the corpus. Refuses to know shards and snapshots: the same documents in
the same order give the same snapshot, however they were cut into batches and parts.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
from numpy.typing import NDArray

from model.data.tokenizer import Tokenizer
from tasks.data.document import Document, Piece, Rejected, Source
from tasks.data.document_split import split_of
from tasks.data.seen_digests import SeenDigests

BATCH_BYTES = 1 << 20
BATCH_PIECES = 4096
# What a killed try repeats at most.
PART_BYTES = 64 << 20
# The tokenizer has threads of its own, one a core; a second batch in flight keeps them busy between batches.
WORKERS = 2
_PART_NAMES = "part-*.arrow"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsDone:
    """Where earlier tries came to: ``pieces`` of ``source`` and every source before it are in ``paths``."""

    paths: tuple[Path, ...]
    source: str
    pieces: int
    text_bytes: int
    documents: int


def part_schema(tokens: "np.dtype[Any]") -> pa.Schema:
    """Return the columns of a part: a document with its token ids, or a rejected one with ``kind`` and ``detail``."""
    return pa.schema(
        [
            ("source", pa.string()),
            ("offset_bytes", pa.int64()),
            ("bytes", pa.int64()),
            ("split", pa.string()),
            ("sha256", pa.string()),
            ("kind", pa.string()),
            ("detail", pa.string()),
            ("ids", pa.large_list(pa.from_numpy_dtype(tokens))),
        ]
    )


def finished_parts(folder: Path) -> PartsDone:
    """Return what earlier tries left in ``folder``; what comes after a part that cannot be read is removed with it."""
    paths: list[Path] = []
    while (path := _part(folder, len(paths))).is_file() and _is_readable(path):
        paths.append(path)
    for path in set(folder.glob(_PART_NAMES)) - set(paths):
        path.unlink()
    source, pieces, text_bytes, documents = "", 0, 0, 0
    for batch in part_batches(paths):
        names = batch.column("source").to_pylist()
        last = names.count(names[-1])
        pieces = pieces + last if (source, len(names)) == (names[-1], last) else last
        source = names[-1]
        text_bytes += compute.sum(batch.column("bytes")).as_py()
        documents += batch.column("kind").null_count
    return PartsDone(paths=tuple(paths), source=source, pieces=pieces, text_bytes=text_bytes, documents=documents)


def pieces_left(sources: Sequence[Source], done: PartsDone) -> Iterator[Piece]:
    """Yield what no part holds yet; the source that was broken off is read from its start, to be hashed whole."""
    names = [source.name for source in sources]
    for source in sources[names.index(done.source) if done.paths else 0 :]:
        yield from islice(source.pieces(), done.pieces if source.name == done.source else 0, None)


def seen_in(done: PartsDone) -> SeenDigests:
    """Return the digests of all documents in the parts."""
    seen = SeenDigests()
    for batch in part_batches(done.paths):
        for digest in batch.column("sha256").drop_null().to_pylist():
            seen.add(digest)
    return seen


def part_batches(paths: Iterable[Path]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of parts in order, one in memory at a time."""
    for path in paths:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)


def encoded_batches(
    pieces: Iterator[Piece],
    tokenizer: Tokenizer,
    val_fraction: float,
    schema: pa.Schema,
    *,
    workers: int,
    batch_bytes: int,
) -> Iterator[pa.RecordBatch]:
    """Yield the pieces in their order with their tokens, each document's followed by end-of-text."""
    waiting: deque[Future[pa.RecordBatch]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool:
        try:
            for batch in _batches(pieces, batch_bytes):
                waiting.append(pool.submit(_encode, batch, tokenizer, val_fraction, schema))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def write_parts(
    folder: Path,
    first: int,
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    *,
    part_bytes: int,
    on_batch: Callable[[pa.RecordBatch], None],
) -> None:
    """Write the batches as parts from number ``first`` on; each is complete on disk before it has its name."""
    number, batch = first, next(batches, None)
    while batch is not None:
        held, unfinished = 0, _part(folder, number).with_suffix(".unfinished")
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            while batch is not None and held < part_bytes:
                writer.write_batch(batch)
                on_batch(batch)
                held += compute.sum(batch.column("bytes")).as_py()
                batch = next(batches, None)
        _finish(unfinished, _part(folder, number))
        number += 1


def _is_readable(path: Path) -> bool:
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file):
            return True
    except pa.ArrowException:
        return False


def _finish(unfinished: Path, path: Path) -> None:
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(unfinished, path)


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.arrow"


def _batches(pieces: Iterator[Piece], batch_bytes: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    held_bytes = 0
    for piece in pieces:
        batch.append(piece)
        held_bytes += piece.bytes if isinstance(piece, Document) else 0
        if held_bytes >= batch_bytes or len(batch) == BATCH_PIECES:
            yield batch
            batch, held_bytes = [], 0
    if batch:
        yield batch


def _encode(pieces: list[Piece], tokenizer: Tokenizer, val_fraction: float, schema: pa.Schema) -> pa.RecordBatch:
    texts = [piece.text for piece in pieces if isinstance(piece, Document)]
    ids, lengths = tokenizer.encode_flat(texts)
    # After every document, the last one too: a window never joins two texts without a mark between them.
    ids = np.insert(ids, np.cumsum(lengths), tokenizer.end_of_text_id)
    kept = iter((lengths + 1).tolist())
    counts = [next(kept) if isinstance(piece, Document) else 0 for piece in pieces]
    columns = zip(*(_row(piece, val_fraction) for piece in pieces), strict=True)
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=False)]
    return pa.record_batch([*arrays, _ragged(ids, counts, schema.field("ids").type)], schema=schema)


def _ragged(ids: NDArray[np.uint32], counts: list[int], kind: Any) -> pa.Array:
    offsets = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    values = pa.array(ids.astype(kind.value_type.to_pandas_dtype(), copy=False))
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _row(piece: Piece, val_fraction: float) -> tuple[str, int, int, str | None, str | None, str | None, str | None]:
    if isinstance(piece, Rejected):
        return piece.source, piece.offset_bytes, 0, None, None, piece.kind.value, piece.detail
    split = split_of(piece.sha256, val_fraction).value
    return piece.source, piece.offset_bytes, piece.bytes, split, piece.sha256, None, None
