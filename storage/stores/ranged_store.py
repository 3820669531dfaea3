"""The common part of stores in a bucket: names below a prefix, and large objects read by ranges, a few ahead."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from cairn.storage.errors import IntegrityError
from cairn.storage.stores.object_store import READ_CHUNK_BYTES, ObjectStore, RetryPolicy, check_key, map_ahead

_READS_AHEAD = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The body of a GET, with the ETag and size of the whole object."""

    data: bytes
    etag: str
    total_bytes: int


class RangedStore(ObjectStore, Protocol):
    """An `ObjectStore` below one prefix of a bucket, whose requests are retried."""

    _retry_policy: RetryPolicy
    _root: str
    """The bucket's URL."""
    _below: str
    """The prefix with a slash behind it, or nothing."""

    @property
    def url(self) -> str:
        """The store's URL, without credentials."""
        return f"{self._root}/{self._below}".rstrip("/")

    def _fetch_range(self, name: str, start: int, size: int, etag: str | None = None) -> Fetched:
        """Return `size` bytes from `start`, none beyond the end, in one GET; IntegrityError if the ETag is another."""

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield ranged GETs, a few ahead, each with retries; IntegrityError if the object is replaced meanwhile."""
        name, retries, most_bytes = self._name(key), self._retry_policy, READ_CHUNK_BYTES
        first = retries.call(self._fetch_range, name, 0, most_bytes)
        if first.data:
            yield first.data

        def fetch_whole(start: int) -> bytes:
            data = retries.call(self._fetch_range, name, start, most_bytes, first.etag).data
            if len(data) != (expected := min(most_bytes, first.total_bytes - start)):
                raise IntegrityError(f"{self.url}/{key}: {len(data)} bytes at {start}, not {expected}")
            return data

        if starts := range(len(first.data), first.total_bytes, most_bytes):
            pool = ThreadPoolExecutor(_READS_AHEAD, thread_name_prefix="cairn-read")
            try:
                yield from map_ahead(pool, fetch_whole, starts, most=_READS_AHEAD)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        """Fill `into` from `start` with one ranged GET, with retries; raises ObjectMissing."""
        name = self._name(key)
        if not into.nbytes:
            return 0
        data = self._retry_policy.call(self._fetch_range, name, start, into.nbytes).data
        into[: len(data)] = data
        return len(data)

    def keys(self, prefix: str) -> list[str]:
        """Return all keys below the folder `prefix`, sorted, in one request per thousand."""
        return sorted(self.sizes(prefix))

    def _name(self, key: str) -> str:
        return self._below + check_key(key)

    def _key(self, name: str) -> str:
        return name[len(self._below) :]
