"""A store behind any fsspec file system but S3: `gs://`, `abfs://`, `sftp://` and the rest, by fsspec's own calls.

Owns the mapping from keys to paths. `create` is what the file system makes of `mode='create'`, which not every one
makes exclude: the store probe decides whether a run may be kept there. `s3_store` serves `s3://`. Listing caches and
shared instances are off where they can be: both serve stale names.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from storage.stores.object_store import (
    MOST_READ_BYTES,
    UnfinishedWrite,
    WrittenObject,
    checked_key,
    is_key,
    larger_than,
)
from storage.stores.s3_error import without_credentials

_PART_BYTES = 16 * 1024 * 1024
_READ_BYTES = 8 * 1024 * 1024
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class RemoteStore:
    """An `ObjectStore` over one fsspec file system and a root path in it."""

    def __init__(self, url: str) -> None:
        """Open the file system `url` names, with its own credential chain and no caches."""
        import fsspec

        self._url = url.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise StorageError(f"store {url!r}: cannot be opened: {error}; choose another --store") from error
        self._root = str(root).rstrip("/")

    @property
    def url(self) -> str:
        """Where this store is, without credentials."""
        return self._url

    def read(self, key: str, *, at_most_bytes: int = MOST_READ_BYTES) -> bytes:
        """Return the object's bytes; raise `ObjectMissing` where there is none, `IntegrityError` where it is larger."""
        path = self._path(key)
        with self._explained("read", key), self._files.open(path, "rb", block_size=_READ_BYTES) as file:
            data: bytes = file.read(at_most_bytes + 1)
        if len(data) > at_most_bytes:
            raise larger_than(f"{self.url}/{key}", at_most_bytes)
        return data

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes piece by piece; `ObjectMissing` comes with the first one."""
        path = self._path(key)
        with self._explained("read", key), self._files.open(path, "rb", block_size=_READ_BYTES) as file:
            while chunk := file.read(_READ_BYTES):
                yield chunk

    def create(self, key: str, data: bytes) -> bool:
        """Create the object only if absent: True when this call made it, False when one was there."""
        with self._explained("create", key):
            try:
                self._files.pipe_file(self._path(key), data, mode="create")
            except FileExistsError:
                return False
            return True

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite."""
        with self._explained("write", key):
            self._files.pipe_file(self._path(key), data)

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> WrittenObject:
        """Upload chunks as one object, hashing on the way."""
        digest, size = hashlib.sha256(), 0
        with self._explained("upload", key):
            file = self._files.open(self._path(key), "wb", block_size=_PART_BYTES)
        try:
            for chunk in chunks:
                digest.update(chunk)
                with self._explained("upload", key):
                    size += file.write(chunk)
        except BaseException:
            # Closed without its last block, a buffered file is never put in place.
            file.discard()
            with suppress(AttributeError):
                file.closed = True
            raise
        with self._explained("upload", key):
            file.close()
        return WrittenObject(bytes=size, sha256=digest.hexdigest())

    def keys(self, prefix: str) -> list[str]:
        """Return all keys under the folder `prefix`, sorted."""
        path = self._path(prefix)
        try:
            with self._explained("list", prefix):
                found = (self._key(name) for name in self._files.find(path) if name != path)
                return sorted(filter(is_key, found))
        except ObjectMissing:
            return []

    def folders(self, prefix: str) -> list[str]:
        """Return the keys of the folders directly under the folder `prefix`, sorted."""
        return self._listed(prefix, "directory")

    def first(self, prefix: str) -> str | None:
        """Return the smallest key directly under the folder `prefix`; costs a listing of the folder."""
        return next(iter(self._listed(prefix, "file")), None)

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None where there is no object."""
        try:
            with self._explained("stat", key):
                found = self._files.info(self._path(key))
        except ObjectMissing:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def delete(self, key: str) -> None:
        """Delete the object if it is there."""
        try:
            with self._explained("delete", key):
                self._files.rm_file(self._path(key))
        except ObjectMissing:
            return

    def unfinished(self, prefix: str) -> list[UnfinishedWrite]:
        """Return nothing: fsspec has no name for what a dead writer left; set the bucket's own expiry for it."""
        checked_key(prefix)
        return []

    def discard(self, write: UnfinishedWrite) -> None:
        """Do nothing: no unfinished write is ever named."""
        checked_key(write.key)

    def local_path(self, key: str) -> Path | None:
        """Return None: the bytes are elsewhere."""
        checked_key(key)
        return None

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"

    def _key(self, path: str) -> str:
        return path[len(self._root) + 1 :]

    def _listed(self, prefix: str, kind: str) -> list[str]:
        path = self._path(prefix)
        try:
            with self._explained("list", prefix):
                found: list[dict[str, Any]] = self._files.ls(path, detail=True)
        except ObjectMissing:
            return []
        names = [item["name"].rstrip("/") for item in found if item["type"] == kind]
        return sorted(filter(is_key, (self._key(name) for name in names if name != path)))

    @contextmanager
    def _explained(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except _ABSENT as missing:
            raise ObjectMissing(f"{self.url}/{key}: no such object") from missing
        except Exception as error:
            problem = f"{self.url}/{key}: cannot {doing}: {type(error).__name__}: {error}"
            kind = StoreRefused if isinstance(error, PermissionError) else StoreUnavailable
            raise kind(without_credentials(problem)) from error
