"""Writes and reads a checkpoint's shards: every byte is hashed once, every chunk verified before its use.

A chunk that does not verify is read again, from the store and not from a cache, before it counts as damaged.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeVar

from cairn.storage.checkpoints import payload
from cairn.storage.checkpoints.payload import CHUNK_BYTES, DIGEST_BYTES, ManifestShard, TensorRecord, shard_header
from cairn.storage.errors import IntegrityError, ObjectDamaged, ObjectMissing
from cairn.storage.stores.local_store import forget_cached_bytes
from cairn.storage.stores.object_store import PAGE_BYTES, ObjectStore

T = TypeVar("T")
READ_TRIES = 3
"""How often something is read before it counts as damaged."""
_ALONE_BYTES = 1024 * 1024
"""Smaller chunks that lie side by side are read together: a request costs more than copying them."""

Run = Callable[..., Callable[[], Any]]
"""Starts a function and returns a function that waits for its result."""


@contextmanager
def transfers(threads: int, thread_start: Callable[[], None] | None = None) -> Iterator[Run]:
    """Yield a `Run` in so many threads, or the caller's if it is 1; an error in the block drops what has not begun."""
    if threads == 1:
        yield lambda function, *arguments: repeat(function(*arguments)).__next__
        return
    pool = ThreadPoolExecutor(threads, "transfer", initializer=thread_start)
    try:
        yield lambda function, *arguments: pool.submit(function, *arguments).result
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedBytes:
    """The bytes of a tensor that a reader needs: they go into `memory`, or piece by piece, with offset, to `take`."""

    name: str
    begin: int
    end: int
    memory: memoryview | None = None
    take: Callable[[int, memoryview], None] = lambda begin, data: None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPolicy:
    """How often something is read before it counts as damaged, and how the reader waits in between."""

    tries: int = READ_TRIES
    sleep: Callable[[float], None] = time.sleep

    def call(self, store: ObjectStore, key: str, read: Callable[[], T]) -> T:
        """Return what `read` returns; its ObjectDamaged is raised only when it raised that at every read."""
        for number in range(1, self.tries + 1):
            try:
                return read()
            except ObjectDamaged:
                if number == self.tries:
                    raise
            self.sleep(0.1 * 2**number)
            with suppress(IntegrityError):
                if path := store.local_path(key):
                    forget_cached_bytes(path)
        raise AssertionError("the last read returns or raises")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """One chunk of a tensor, where it lies in its shard, and what part of it is wanted."""

    wanted: WantedBytes
    begin: int
    size: int
    position: int
    sha256: bytes

    @property
    def place(self) -> memoryview | None:
        """The memory for all of it, where it is wanted whole."""
        wanted = self.wanted
        if wanted.memory is None or self.begin < wanted.begin or self.begin + self.size > wanted.end:
            return None
        return wanted.memory[self.begin - wanted.begin : self.begin - wanted.begin + self.size]

    def deliver(self, data: memoryview) -> None:
        """Hand over what is wanted of the verified bytes."""
        wanted = self.wanted
        first, end = max(self.begin, wanted.begin), min(self.begin + self.size, wanted.end)
        piece = data[first - self.begin : end - self.begin]
        if wanted.memory is None:
            wanted.take(first - wanted.begin, piece)
        else:
            wanted.memory[first - wanted.begin : end - wanted.begin] = piece


class ShardReader:
    """Reads from one shard of a checkpoint."""

    def __init__(
        self, store: ObjectStore, key: str, shard: ManifestShard, read_policy: ReadPolicy, scratch: threading.local
    ) -> None:
        """Use `scratch`, which several readers may share, for one buffer a thread."""
        self._store, self._key, self._shard = store, key, shard
        self._read_policy, self._scratch = read_policy, scratch

    def begin(self, run: Run, wanted: Iterable[WantedBytes]) -> list[Callable[[], None]]:
        """Start to read the header and what is wanted; return a wait for each read, which raises ObjectDamaged."""
        by_name, groups, end, filled = {item.name: item for item in wanted}, list[list[_Chunk]](), -1, 0
        for tensor, position in self._shard.placed():
            if (part := by_name.get(tensor.name)) is None or part.begin == part.end:
                continue
            for begin in range(part.begin // CHUNK_BYTES * CHUNK_BYTES, part.end, CHUNK_BYTES):
                first = begin // CHUNK_BYTES * DIGEST_BYTES
                size, sha256 = min(CHUNK_BYTES, tensor.bytes - begin), tensor.chunks[first : first + DIGEST_BYTES]
                # Small chunks that follow each other in the shard are joined, up to the size of one chunk.
                if end != position + begin or max(size, filled) >= _ALONE_BYTES:
                    groups.append([])
                    filled = 0
                groups[-1].append(_Chunk(wanted=part, begin=begin, size=size, position=position + begin, sha256=sha256))
                end, filled = position + begin + size, filled + size
        return [run(self._retry, self._check_header), *(run(self._read_group, group) for group in groups)]

    def _check_header(self) -> None:
        shard = self._shard
        if (size := self._store.size(self._key)) != shard.bytes:
            found = "missing" if size is None else f"{size} bytes"
            raise ObjectDamaged(self._key, expected=f"{shard.bytes} bytes", found=found)
        header = memoryview(bytearray(shard.header_bytes))
        self._fill(0, header, shard.sha256)
        if (found := shard_sha256(header, (tensor.chunks for tensor in shard.tensors))) != shard.sha256:
            raise ObjectDamaged(self._key, expected=shard.sha256, found=f"sha256 of header and chunks is {found}")
        if header != shard_header(shard.tensors):
            raise IntegrityError(f"{self._key}: its header is not that of the tensors in the manifest")

    def _read_group(self, group: Sequence[_Chunk]) -> None:
        if len(group) == 1 and (place := group[0].place) is not None:
            self._retry(self._read_chunks, group, place)
            return
        if not hasattr(self._scratch, "buffer"):
            self._scratch.buffer = memoryview(bytearray(CHUNK_BYTES))
        into: memoryview = self._scratch.buffer[: sum(chunk.size for chunk in group)]
        self._retry(self._read_chunks, group, into)
        for chunk in group:
            chunk.deliver(into[chunk.position - group[0].position :][: chunk.size])

    def _retry(self, read: Callable[..., None], *arguments: Any) -> None:
        self._read_policy.call(self._store, self._key, lambda: read(*arguments))

    def _read_chunks(self, group: Sequence[_Chunk], into: memoryview) -> None:
        self._fill(group[0].position, into, group[0].sha256.hex())
        for chunk in group:
            found = hashlib.sha256(into[chunk.position - group[0].position :][: chunk.size])
            if found.digest() != chunk.sha256:
                place = f"bytes {chunk.begin} to {chunk.begin + chunk.size} of {chunk.wanted.name}"
                found_there = f"sha256 is {found.hexdigest()} for {place}"
                raise ObjectDamaged(self._key, expected=chunk.sha256.hex(), found=found_there)

    def _fill(self, position: int, into: memoryview, expected: str) -> None:
        try:
            filled = self._store.read_range(self._key, position, into)
        except ObjectMissing as missing:
            raise ObjectDamaged(self._key, expected=expected, found="missing") from missing
        if filled != into.nbytes:
            found = f"{filled} bytes from {position} on, where {into.nbytes} must be"
            raise ObjectDamaged(self._key, expected=expected, found=found)


def begin_shard(
    write: Run, digest: Run, store: ObjectStore, key: str, records: Sequence[TensorRecord]
) -> Callable[[], ManifestShard]:
    """Start to write a shard and to hash it, each by itself; return a wait for what the manifest says of it."""
    header = shard_header(records)
    written = write(store.write_stream, key, payload.shard_chunks(records))
    digests = [[digest(_digest, chunk) for chunk in payload.chunks_of(record.data)] for record in records]

    def wait() -> ManifestShard:
        size_bytes = written()
        joined = (b"".join(found() for found in own) for own in digests)
        tensors = tuple(
            payload.TensorDigest(name=item.name, dtype=item.dtype, shape=item.shape, chunks=chunks)
            for item, chunks in zip(records, joined, strict=True)
        )
        sha256 = shard_sha256(header, (tensor.chunks for tensor in tensors))
        name = key.rpartition("/")[2]
        return ManifestShard(name=name, bytes=size_bytes, sha256=sha256, header_bytes=len(header), tensors=tensors)

    return wait


def _digest(chunk: memoryview) -> bytes:
    return hashlib.sha256(chunk).digest()


def shard_sha256(header: bytes | memoryview, digests: Iterable[bytes]) -> str:
    """Return the hex digest of a shard: over its header, then the digests of its chunks."""
    return hashlib.sha256(b"".join((header, *digests))).hexdigest()


def cut_shards(records: Iterable[TensorRecord], shard_bytes: int) -> list[list[TensorRecord]]:
    """Return the records in name order, whole pages first, in shards of at most `shard_bytes` or one record."""
    shards, filled = [list[TensorRecord]()], 0
    for record in sorted(records, key=lambda record: (record.data.nbytes % PAGE_BYTES > 0, record.name)):
        if filled and filled + record.data.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(record)
        filled += record.data.nbytes
    return shards
