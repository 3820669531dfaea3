"""A store behind any fsspec file system except S3: `gs://`, `abfs://`, `sftp://` and others.

`create` uses fsspec's `mode='create'`, which does not exclude on every file system: the store probe checks it.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable
from storage.stores.object_store import (
    MAX_READ_BYTES,
    PART_BYTES,
    READ_CHUNK_BYTES,
    ObjectStore,
    WrittenObject,
    check_key,
    is_key,
    too_large,
)
from storage.stores.s3_error import strip_credentials


class RemoteStore(ObjectStore):
    """An `ObjectStore` over one fsspec file system and a root path in it."""

    def __init__(self, url: str) -> None:
        """Open the file system of `url`, without listing caches and shared instances: both return stale names."""
        import fsspec

        self._url = url.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise StorageError(f"store {url!r}: cannot be opened: {error}; choose another --store") from error
        self._root = str(root).rstrip("/")

    @property
    def url(self) -> str:
        """The store's URL, without credentials."""
        return self._url

    def read(self, key: str, *, at_most_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the object's bytes; raises ObjectMissing, or IntegrityError for a larger object."""
        path = self._path(key)
        with self._convert_errors("read", key), self._files.open(path, "rb", block_size=READ_CHUNK_BYTES) as file:
            data: bytes = file.read(at_most_bytes + 1)
        if len(data) > at_most_bytes:
            raise too_large(f"{self.url}/{key}", at_most_bytes)
        return data

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes in chunks; the first chunk raises ObjectMissing."""
        path = self._path(key)
        with self._convert_errors("read", key), self._files.open(path, "rb", block_size=READ_CHUNK_BYTES) as file:
            while chunk := file.read(READ_CHUNK_BYTES):
                yield chunk

    def create(self, key: str, data: bytes) -> bool:
        """Create the object if it is absent; returns False if it exists."""
        with self._convert_errors("create", key):
            try:
                self._files.pipe_file(self._path(key), data, mode="create")
            except FileExistsError:
                return False
            return True

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite the object."""
        with self._convert_errors("write", key):
            self._files.pipe_file(self._path(key), data)

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> WrittenObject:
        """Write chunks as one object and hash them."""
        digest, size = hashlib.sha256(), 0
        with self._convert_errors("upload", key):
            file = self._files.open(self._path(key), "wb", block_size=PART_BYTES)
        try:
            for chunk in chunks:
                digest.update(chunk)
                with self._convert_errors("upload", key):
                    size += file.write(chunk)
        except BaseException:
            # A buffered file that is closed without its last block never becomes an object.
            file.discard()
            with suppress(AttributeError):
                file.closed = True
            raise
        with self._convert_errors("upload", key):
            file.close()
        return WrittenObject(bytes=size, sha256=digest.hexdigest())

    def keys(self, prefix: str) -> list[str]:
        """Return all keys below the folder `prefix`, sorted."""
        return self._list(prefix, self._files.find)

    def folders(self, prefix: str) -> list[str]:
        """Return the folders directly below the folder `prefix`, sorted."""
        return self._list(prefix, partial(self._names, "directory"))

    def first(self, prefix: str) -> str | None:
        """Return the smallest key directly below the folder `prefix`; lists the whole folder."""
        return next(iter(self._list(prefix, partial(self._names, "file"))), None)

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None if it is absent."""
        try:
            with self._convert_errors("stat", key):
                found = self._files.info(self._path(key))
        except ObjectMissing:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def delete(self, key: str) -> None:
        """Delete the object if it exists."""
        with suppress(ObjectMissing), self._convert_errors("delete", key):
            self._files.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _names(self, kind: str, path: str) -> list[str]:
        return [item["name"].rstrip("/") for item in self._files.ls(path, detail=True) if item["type"] == kind]

    def _list(self, prefix: str, list_names: Callable[[str], list[str]]) -> list[str]:
        path = self._path(prefix)
        with suppress(ObjectMissing), self._convert_errors("list", prefix):
            keys = (name[len(self._root) + 1 :] for name in list_names(path) if name != path)
            return sorted(filter(is_key, keys))
        return []

    @contextmanager
    def _convert_errors(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as missing:
            raise ObjectMissing(f"{self.url}/{key}: no such object") from missing
        except Exception as error:
            problem = f"{self.url}/{key}: cannot {doing}: {type(error).__name__}: {error}"
            kind = StoreRefused if isinstance(error, PermissionError) else StoreUnavailable
            raise kind(strip_credentials(problem)) from error
