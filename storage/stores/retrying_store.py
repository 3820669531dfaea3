"""A store that asks again where asking twice is as good as once.

Owns which operations those are. Never `create`: a second try would meet the first one's object, and only the log,
which knows its own entry, can tell that from a lost race. Nor `write_stream`: its chunks are gone, so the store
below repeats parts, which it still holds. `read_chunks` is begun again before its first piece; later pieces are
the store's below to resume.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from storage.stores.object_store import MOST_READ_BYTES, ObjectStore, UnfinishedWrite, WrittenObject
from storage.stores.retry_policy import RetryPolicy

_DEFAULT = RetryPolicy()


class RetryingStore:
    """An `ObjectStore` over another one that may be away for some seconds."""

    def __init__(self, inner: ObjectStore, *, retry_policy: RetryPolicy = _DEFAULT) -> None:
        """Ask `inner`, as often as `retry_policy` allows."""
        self._inner = inner
        self._retry_policy = retry_policy

    @property
    def inner(self) -> ObjectStore:
        """The store that is asked."""
        return self._inner

    @property
    def url(self) -> str:
        """Where this store is, without credentials."""
        return self._inner.url

    def read(self, key: str, *, at_most_bytes: int = MOST_READ_BYTES) -> bytes:
        """Return the object's bytes; raise `ObjectMissing` where there is none, `IntegrityError` where it is larger."""
        return self._retry_policy.call(lambda: self._inner.read(key, at_most_bytes=at_most_bytes))

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes piece by piece; asks again only for the first piece."""

        def begin() -> tuple[list[bytes], Iterator[bytes]]:
            chunks = iter(self._inner.read_chunks(key))
            return [chunk for chunk in (next(chunks, None),) if chunk is not None], chunks

        first, rest = self._retry_policy.call(begin)
        yield from chain(first, rest)

    def create(self, key: str, data: bytes) -> bool:
        """Create the object only if absent, asking once."""
        return self._inner.create(key, data)

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite."""
        self._retry_policy.call(lambda: self._inner.write(key, data))

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> WrittenObject:
        """Upload chunks as one object, asking once."""
        return self._inner.write_stream(key, chunks)

    def keys(self, prefix: str) -> list[str]:
        """Return all keys under the folder `prefix`, sorted."""
        return self._retry_policy.call(lambda: self._inner.keys(prefix))

    def folders(self, prefix: str) -> list[str]:
        """Return the keys of the folders directly under the folder `prefix`, sorted."""
        return self._retry_policy.call(lambda: self._inner.folders(prefix))

    def first(self, prefix: str) -> str | None:
        """Return the smallest key directly under the folder `prefix`."""
        return self._retry_policy.call(lambda: self._inner.first(prefix))

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None where there is no object."""
        return self._retry_policy.call(lambda: self._inner.size(key))

    def delete(self, key: str) -> None:
        """Delete the object if it is there."""
        self._retry_policy.call(lambda: self._inner.delete(key))

    def unfinished(self, prefix: str) -> list[UnfinishedWrite]:
        """Return what writers that died or still write have left under the folder `prefix`, sorted by key."""
        return self._retry_policy.call(lambda: self._inner.unfinished(prefix))

    def discard(self, write: UnfinishedWrite) -> None:
        """Throw an unfinished write away."""
        self._retry_policy.call(lambda: self._inner.discard(write))

    def local_path(self, key: str) -> Path | None:
        """Return the file behind the key where the store is this machine's disk, else None."""
        return self._inner.local_path(key)
