"""Reads a large object of a remote store by ranges, a few ahead of the reader."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from cairn.storage.errors import IntegrityError
from cairn.storage.stores.object_store import map_ahead

_READS_AHEAD = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The body of a GET, with the ETag and size of the whole object."""

    data: bytes
    etag: str
    total_bytes: int


class FetchRange(Protocol):
    """One ranged GET; raises IntegrityError if the object is not that of the ETag."""

    def __call__(self, start: int, etag: str | None = None) -> Fetched:
        """Return the bytes from `start`; none beyond the object's end."""


def read_chunks(fetch: FetchRange, where: str, chunk_bytes: int) -> Iterator[bytes]:
    """Yield an object's bytes in order, so many a range; IntegrityError, which names `where`, if one is not whole."""
    first = fetch(0)
    if first.data:
        yield first.data

    def fetch_whole(start: int) -> bytes:
        data, expected = fetch(start, first.etag).data, min(chunk_bytes, first.total_bytes - start)
        if len(data) != expected:
            raise IntegrityError(f"{where}: {len(data)} bytes at {start}, not {expected}")
        return data

    if starts := range(len(first.data), first.total_bytes, chunk_bytes):
        pool = ThreadPoolExecutor(_READS_AHEAD, thread_name_prefix="cairn-read")
        try:
            yield from map_ahead(pool, fetch_whole, starts, most=_READS_AHEAD)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
