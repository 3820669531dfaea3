"""A store that retries the idempotent operations of another one.

Not `create`, because only the log tells a lost race from a second try; nor `write_stream`: its chunks are consumed.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from storage.stores.object_store import MAX_READ_BYTES, ObjectStore, UnfinishedWrite
from storage.stores.retry_policy import RetryPolicy

_DEFAULT = RetryPolicy()


class RetryingStore:
    """An `ObjectStore` over another one that may be unavailable for some seconds."""

    def __init__(self, inner: ObjectStore, *, retry_policy: RetryPolicy = _DEFAULT) -> None:
        self.inner, self._retry_policy = inner, retry_policy

    @property
    def url(self) -> str:
        return self.inner.url

    def read(self, key: str, *, at_most_bytes: int = MAX_READ_BYTES) -> bytes:
        return self._retry_policy.call(lambda: self.inner.read(key, at_most_bytes=at_most_bytes))

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes in chunks; only the first chunk is retried."""

        def begin() -> tuple[list[bytes], Iterator[bytes]]:
            chunks = iter(self.inner.read_chunks(key))
            return [chunk for chunk in (next(chunks, None),) if chunk is not None], chunks

        first, rest = self._retry_policy.call(begin)
        yield from chain(first, rest)

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        return self._retry_policy.call(lambda: self.inner.read_range(key, start, into))

    def create(self, key: str, data: bytes) -> bool:
        return self.inner.create(key, data)

    def write(self, key: str, data: bytes) -> None:
        self._retry_policy.call(lambda: self.inner.write(key, data))

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        return self.inner.write_stream(key, chunks)

    def keys(self, prefix: str) -> list[str]:
        return self._retry_policy.call(lambda: self.inner.keys(prefix))

    def folders(self, prefix: str) -> list[str]:
        return self._retry_policy.call(lambda: self.inner.folders(prefix))

    def first(self, prefix: str) -> str | None:
        return self._retry_policy.call(lambda: self.inner.first(prefix))

    def size(self, key: str) -> int | None:
        return self._retry_policy.call(lambda: self.inner.size(key))

    def sizes(self, prefix: str) -> dict[str, int]:
        return self._retry_policy.call(lambda: self.inner.sizes(prefix))

    def age_seconds(self, key: str) -> float | None:
        return self._retry_policy.call(lambda: self.inner.age_seconds(key))

    def delete_all(self, keys: Sequence[str]) -> None:
        self._retry_policy.call(lambda: self.inner.delete_all(keys))

    def delete(self, key: str) -> None:
        self._retry_policy.call(lambda: self.inner.delete(key))

    def unfinished(self, prefix: str) -> list[UnfinishedWrite]:
        return self._retry_policy.call(lambda: self.inner.unfinished(prefix))

    def discard(self, write: UnfinishedWrite) -> None:
        self._retry_policy.call(lambda: self.inner.discard(write))

    def local_path(self, key: str) -> Path | None:
        return self.inner.local_path(key)
