"""Moves shards between memory and a store, several at a time, and hashes every byte on the way."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from heapq import merge
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from storage.checkpoints.tensor_record import TensorRecord
from storage.checkpoints.tensor_shard import parse_shard
from storage.stores.object_store import ObjectStore
from storage.stores.verified_object import ExpectedObject, WrittenObject, check_size, read_verified_into, write_hashed

_PIECE_BYTES = 8 * 1024 * 1024
name_of = attrgetter("name")

Buffers = Callable[[Sequence[int]], Sequence[memoryview]]
"""Returns writable memory of these sizes in bytes."""
Run = Callable[..., Callable[[], Any]]
"""Starts a function and returns a function that waits for its result."""
ShardRead = Callable[[], tuple[TensorRecord, ...]]
"""Waits for the tensors of one shard."""


def fresh_buffers(sizes: Sequence[int]) -> list[memoryview]:
    """Return new memory; numpy asks the kernel for huge pages."""
    return [memoryview(np.empty(size, dtype=np.uint8).data) for size in sizes]


@contextmanager
def transfers(count: int, thread_start: Callable[[], None] | None = None) -> Iterator[Run]:
    """Yield a `Run` that works in `count` threads, `thread_start` first in each, or in the caller's if it is 1."""
    if count == 1:
        yield lambda function, *arguments: repeat(function(*arguments)).__next__
        return
    with ThreadPoolExecutor(count, "transfer", initializer=thread_start) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result


def write_pieces(store: ObjectStore, key: str, chunks: Iterable[memoryview]) -> WrittenObject:
    """Write chunks of any size as one object, in pieces small enough to be hashed in the processor's cache."""
    pieces = (chunk[start : start + _PIECE_BYTES] for chunk in chunks for start in range(0, chunk.nbytes, _PIECE_BYTES))
    return write_hashed(store, key, pieces)


def begin_reads(run: Run, store: ObjectStore, shards: Sequence[ExpectedObject], buffers: Buffers) -> list[ShardRead]:
    """Start reading and verifying shards into the memory of one call of `buffers`; return one wait for each shard."""
    for expected in shards:
        check_size(store, expected)
    memory = buffers([expected.bytes for expected in shards])

    def read(expected: ExpectedObject, into: memoryview) -> tuple[TensorRecord, ...]:
        read_verified_into(into, store, expected)
        return parse_shard(into, where=expected.key)

    return [run(read, expected, into) for expected, into in zip(shards, memory, strict=True)]


def arriving(reads: Iterable[ShardRead], kept: list[TensorRecord]) -> Iterator[TensorRecord]:
    """Yield the records of each read as soon as it is complete, and append them to `kept`."""
    for read in reads:
        for record in read():
            kept.append(record)
            yield record


def in_name_order(*sources: Iterable[TensorRecord]) -> Iterator[TensorRecord]:
    """Merge sources that are each in name order, without reading ahead."""
    return merge(*sources, key=name_of)


def cut_shards(records: Iterable[TensorRecord], shard_bytes: int) -> list[list[TensorRecord]]:
    """Return the records in name order, cut into shards of at most `shard_bytes` unless one record is larger."""
    shards: list[list[TensorRecord]] = [[]]
    filled = 0
    for record in sorted(records, key=name_of):
        if filled and filled + record.data.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(record)
        filled += record.data.nbytes
    return shards
