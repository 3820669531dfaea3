"""A store in this process's memory, for tests; a lock makes its create exclude, unlike fsspec's; and one that dies."""

import sys
import threading
from collections.abc import Iterable, Iterator

from cairn.storage.errors import ObjectMissing, StorageError
from cairn.storage.stores.object_store import MAX_READ_BYTES, ObjectStore, check_key, too_large


class MemoryStore(ObjectStore):
    """An `ObjectStore` over a dictionary."""

    def __init__(self, name: str = "unnamed") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def read(self, key: str, *, at_most_bytes: int = MAX_READ_BYTES) -> bytes:
        with self._lock:
            if check_key(key) not in self._objects:
                raise ObjectMissing(f"{self.url}/{key}: no such object")
            if len(self._objects[key]) > at_most_bytes:
                raise too_large(f"{self.url}/{key}", at_most_bytes)
            return self._objects[key]

    def read_chunks(self, key: str) -> Iterator[bytes]:
        yield self.read(key, at_most_bytes=sys.maxsize)

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        found = self.read(key, at_most_bytes=sys.maxsize)[start : start + into.nbytes]
        into[: len(found)] = found
        return len(found)

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if check_key(key) in self._objects:
                return False
            self._objects[key] = bytes(data)
            return True

    def write(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[check_key(key)] = bytes(data)

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        data = b"".join(bytes(chunk) for chunk in chunks)
        self.write(key, data)
        return len(data)

    def keys(self, prefix: str) -> list[str]:
        with self._lock:
            folder = check_key(prefix) + "/"
            return sorted(key for key in self._objects if key.startswith(folder))

    def folders(self, prefix: str) -> list[str]:
        below = len(prefix) + 1
        return sorted({f"{prefix}/{key[below:].split('/')[0]}" for key in self.keys(prefix) if "/" in key[below:]})

    def first(self, prefix: str) -> str | None:
        return next((key for key in self.keys(prefix) if "/" not in key[len(prefix) + 1 :]), None)

    def size(self, key: str) -> int | None:
        with self._lock:
            return len(self._objects[key]) if check_key(key) in self._objects else None

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)


class CrashingStore:
    """A store whose k-th write never happens: the process is gone."""

    def __init__(self, inner: ObjectStore, crash_at: int) -> None:
        self.inner, self.left, self.url = inner, crash_at, inner.url
        self.read, self.keys, self.first, self.size = inner.read, inner.keys, inner.first, inner.size
        self.delete, self.local_path, self.folders = inner.delete, inner.local_path, inner.folders
        self.read_chunks = inner.read_chunks

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StorageError("crashed")

    def create(self, key: str, data: bytes) -> bool:
        self._count()
        return self.inner.create(key, data)

    def write(self, key: str, data: bytes) -> None:
        self._count()
        self.inner.write(key, data)

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        self._count()
        return self.inner.write_stream(key, chunks)
