"""A store in this process's memory, for tests and dry runs.

fsspec's own memory file system checks and then writes, so two creators can both win; here one lock
makes create-if-absent exclude. Nothing survives the process.
"""

import hashlib
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from storage.errors import ObjectMissing
from storage.stores.object_store import MOST_READ_BYTES, UnfinishedWrite, WrittenObject, checked_key, larger_than


class MemoryStore:
    """An `ObjectStore` over a dictionary."""

    def __init__(self, name: str = "unnamed") -> None:
        """Make an empty store called `name`."""
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The store's name as a URL."""
        return f"memory://{self._name}"

    def read(self, key: str, *, at_most_bytes: int = MOST_READ_BYTES) -> bytes:
        """Return the object's bytes; raise `ObjectMissing` where there is none, `IntegrityError` where it is larger."""
        with self._lock:
            if checked_key(key) not in self._objects:
                raise ObjectMissing(f"{self.url}/{key}: no such object")
            if len(self._objects[key]) > at_most_bytes:
                raise larger_than(f"{self.url}/{key}", at_most_bytes)
            return self._objects[key]

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes."""
        yield self.read(key, at_most_bytes=sys.maxsize)

    def create(self, key: str, data: bytes) -> bool:
        """Create the object only if absent: True when this call made it."""
        with self._lock:
            if checked_key(key) in self._objects:
                return False
            self._objects[key] = bytes(data)
            return True

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite."""
        with self._lock:
            self._objects[checked_key(key)] = bytes(data)

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> WrittenObject:
        """Join the chunks into one object; nothing is visible before the last one."""
        data = b"".join(bytes(chunk) for chunk in chunks)
        self.write(key, data)
        return WrittenObject(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def keys(self, prefix: str) -> list[str]:
        """Return all keys under the folder `prefix`, sorted."""
        with self._lock:
            folder = checked_key(prefix) + "/"
            return sorted(key for key in self._objects if key.startswith(folder))

    def folders(self, prefix: str) -> list[str]:
        """Return the keys of the folders directly under the folder `prefix`, sorted."""
        below = len(prefix) + 1
        return sorted({f"{prefix}/{key[below:].split('/')[0]}" for key in self.keys(prefix) if "/" in key[below:]})

    def first(self, prefix: str) -> str | None:
        """Return the smallest key directly under the folder `prefix`."""
        return next((key for key in self.keys(prefix) if "/" not in key[len(prefix) + 1 :]), None)

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None where there is no object."""
        with self._lock:
            return len(self._objects[key]) if checked_key(key) in self._objects else None

    def delete(self, key: str) -> None:
        """Delete the object if it is there."""
        with self._lock:
            self._objects.pop(checked_key(key), None)

    def unfinished(self, prefix: str) -> list[UnfinishedWrite]:
        """Return nothing: a write that is not done leaves nothing in memory."""
        checked_key(prefix)
        return []

    def discard(self, write: UnfinishedWrite) -> None:
        """Do nothing: there are no unfinished writes."""
        checked_key(write.key)

    def local_path(self, key: str) -> Path | None:
        """Return None: memory has no files."""
        checked_key(key)
        return None
