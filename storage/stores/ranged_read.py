"""Reads a large object of a remote store by ranges, a few ahead of the reader."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from cairn.storage.errors import IntegrityError
from cairn.storage.stores.object_store import RetryPolicy, map_ahead

_READS_AHEAD = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The body of a GET, with the ETag and size of the whole object."""

    data: bytes
    etag: str
    total_bytes: int


class FetchRange(Protocol):
    """One ranged GET; raises IntegrityError if the object is not that of the ETag."""

    def __call__(self, name: str, start: int, etag: str | None = None, size: int = 0) -> Fetched:
        """Return `size` bytes from `start`, 0 meaning a chunk; none beyond the object's end."""


def read_range(retries: RetryPolicy, fetch: FetchRange, name: str, start: int, into: memoryview) -> int:
    """Fill `into` with an object's bytes from `start` by one range; returns how many there were."""
    if not into.nbytes:
        return 0
    data = retries.call(fetch, name, start, None, into.nbytes).data
    into[: len(data)] = data
    return len(data)


def read_chunks(retries: RetryPolicy, fetch: FetchRange, name: str, where: str, chunk_bytes: int) -> Iterator[bytes]:
    """Yield an object's bytes in order, so many a range; IntegrityError, which names `where`, if one is not whole."""
    first = retries.call(fetch, name, 0, None)
    if first.data:
        yield first.data

    def fetch_whole(start: int) -> bytes:
        data, expected = retries.call(fetch, name, start, first.etag).data, min(chunk_bytes, first.total_bytes - start)
        if len(data) != expected:
            raise IntegrityError(f"{where}: {len(data)} bytes at {start}, not {expected}")
        return data

    if starts := range(len(first.data), first.total_bytes, chunk_bytes):
        pool = ThreadPoolExecutor(_READS_AHEAD, thread_name_prefix="cairn-read")
        try:
            yield from map_ahead(pool, fetch_whole, starts, most=_READS_AHEAD)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
