"""Shards between memory and a store, several at a time: cut, written, read, each byte hashed on the way.

Owns the threads, their number and the pieces in which bytes move, so what is under way at once. Refuses to know
manifests, logs and what the tensors mean.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from heapq import merge
from typing import Any

import numpy as np

from storage.checkpoints.tensor_record import TensorRecord
from storage.checkpoints.tensor_shard import parse_shard, shard_chunks
from storage.stores.object_store import ObjectStore, WrittenObject
from storage.stores.verified_object import ExpectedObject, check_size, read_verified_into

_PIECE_BYTES = 8 * 1024 * 1024

Buffers = Callable[[Sequence[int]], Sequence[memoryview]]
"""Gives writable memory of these sizes in bytes."""
Run = Callable[..., Callable[[], Any]]
"""Begins a function and returns what waits for its result."""
ShardRead = Callable[[], tuple[TensorRecord, ...]]
"""Waits for the tensors of one shard."""


def fresh_buffers(sizes: Sequence[int]) -> list[memoryview]:
    """Return new memory, in pages as large as the kernel gives."""
    return [memoryview(np.empty(size, dtype=np.uint8).data) for size in sizes]


def name_of(record: TensorRecord) -> str:
    """Return what records are ordered by."""
    return record.name


@contextmanager
def transfers(count: int, thread_start: Callable[[], None] | None = None) -> Iterator[Run]:
    """Give a `run(function, *arguments)` that works `count` at a time; one at a time is the caller's own thread.

    `thread_start` is called first in each other thread there is, such as to lower its priority.
    """
    if count == 1:
        yield lambda function, *arguments: partial(_same, function(*arguments))
        return
    with ThreadPoolExecutor(count, "transfer", initializer=thread_start) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result


def write_shard(store: ObjectStore, key: str, records: Sequence[TensorRecord]) -> WrittenObject:
    """Write the records as one safetensors object."""
    return write_pieces(store, key, shard_chunks(records))


def write_pieces(store: ObjectStore, key: str, chunks: Iterable[memoryview]) -> WrittenObject:
    """Write chunks of any size as one object, in pieces that are hashed while they are in the processor's cache."""
    pieces = (chunk[start : start + _PIECE_BYTES] for chunk in chunks for start in range(0, chunk.nbytes, _PIECE_BYTES))
    return store.write_stream(key, pieces)


def begin_reads(run: Run, store: ObjectStore, shards: Sequence[ExpectedObject], buffers: Buffers) -> list[ShardRead]:
    """Begin to read and verify shards into what `buffers`, asked once, gives; returns one wait for each."""
    for promised in shards:
        check_size(store, promised)
    memory = buffers([promised.bytes for promised in shards])
    return [run(_read_shard, store, promised, into) for promised, into in zip(shards, memory, strict=True)]


def arriving(reads: Iterable[ShardRead], kept: list[TensorRecord]) -> Iterator[TensorRecord]:
    """Yield the records of one read after the other, as soon as each is there, and keep them."""
    for read in reads:
        for record in read():
            kept.append(record)
            yield record


def in_name_order(*sources: Iterable[TensorRecord]) -> Iterator[TensorRecord]:
    """Merge sources that are in name order each, asking each only for its next record."""
    return merge(*sources, key=name_of)


def cut_shards(records: Iterable[TensorRecord], shard_bytes: int) -> list[list[TensorRecord]]:
    """Return the records in name order, cut where a shard would be larger than `shard_bytes`; never none."""
    shards: list[list[TensorRecord]] = [[]]
    filled = 0
    for record in sorted(records, key=name_of):
        if filled and filled + record.data.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(record)
        filled += record.data.nbytes
    return shards


def _read_shard(store: ObjectStore, promised: ExpectedObject, into: memoryview) -> tuple[TensorRecord, ...]:
    read_verified_into(into, store, promised)
    return parse_shard(into, where=promised.key)


def _same(value: Any) -> Any:
    return value
