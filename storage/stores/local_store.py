"""A store in a folder of this machine, with a create that excludes and survives power loss.

create-if-absent is: temporary file in the same folder, fsync, hard link (EEXIST: somebody was first),
unlink, fsync of the folder. fsspec's local `mode='create'` is exists-then-open and does not exclude.
Temporary names start with a dot, which no key may, so readers never see them; what a killed writer leaves of them is
an unfinished write. No symbolic link below the root is followed out of it: the store is what lies in its folder.
"""

import errno
import hashlib
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from storage.errors import IntegrityError, ObjectMissing, StorageError, StoreUnavailable
from storage.stores.object_store import UnfinishedWrite, WrittenObject, checked_key

_OPEN_TRIES = 8
_CHUNK_BYTES = 8 * 1024 * 1024


class LocalStore:
    """An `ObjectStore` over files below one root folder."""

    def __init__(self, root: Path) -> None:
        """Use `root`; it is made at the first write, not here."""
        self._root = root.absolute()

    @property
    def url(self) -> str:
        """The root folder as a URL."""
        return f"file://{self._root}"

    def read(self, key: str) -> bytes:
        """Return the object's bytes; raise `ObjectMissing` where there is none."""
        return b"".join(self.read_chunks(key))

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes piece by piece; raises `ObjectMissing` where there is none."""
        path = self._path(key)
        try:
            self._check_inside(path)
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as missing:
            raise ObjectMissing(f"{self.url}/{key}: no such object") from missing
        except OSError as error:
            raise StoreUnavailable(f"{self.url}/{key}: cannot read: {error}") from error

    def create(self, key: str, data: bytes) -> bool:
        """Create the object only if absent: True when this call made it."""
        path = self._path(key)
        with self._temporary(path) as (file, temporary):
            file.write(data)
            _flush(file)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            _fsync_folder(path.parent)
            return True

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite, atomically."""
        self.write_stream(key, [data])

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> WrittenObject:
        """Write chunks as one object, hashing on the way; visible only when whole and on disk."""
        path, digest, size = self._path(key), hashlib.sha256(), 0
        with self._temporary(path) as (file, temporary):
            for chunk in chunks:
                digest.update(chunk)
                size += file.write(chunk)
            _flush(file)
            os.replace(temporary, path)
            _fsync_folder(path.parent)
        return WrittenObject(bytes=size, sha256=digest.hexdigest())

    def keys(self, prefix: str) -> list[str]:
        """Return all keys under the folder `prefix`, sorted."""
        found = []
        for folder, folders, names in os.walk(self._path(prefix), onerror=self._unlistable):
            folders[:] = [name for name in folders if not name.startswith(".")]
            relative = Path(folder).relative_to(self._root).as_posix()
            found += [f"{relative}/{name}" for name in names if not name.startswith(".")]
        return sorted(found)

    def folders(self, prefix: str) -> list[str]:
        """Return the keys of the folders directly under the folder `prefix`, sorted."""
        return sorted(f"{prefix}/{entry.name}" for entry in self._scan(prefix) if entry.is_dir())

    def first(self, prefix: str) -> str | None:
        """Return the smallest key directly under the folder `prefix`."""
        names = [entry.name for entry in self._scan(prefix) if entry.is_file()]
        return f"{prefix}/{min(names)}" if names else None

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None where there is no object."""
        try:
            found = self._path(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _explained(error, f"{self.url}/{key}: cannot stat") from error
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def delete(self, key: str) -> None:
        """Delete the object if it is there, and its folder when that is left empty."""
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise _explained(error, f"{self.url}/{key}: cannot delete") from error
        with suppress(OSError):
            path.parent.rmdir()

    def unfinished(self, prefix: str) -> list[UnfinishedWrite]:
        """Return the temporary files under the folder `prefix`; their age is by this machine's clock."""
        found: list[UnfinishedWrite] = []
        for folder, _, names in os.walk(self._path(prefix), onerror=self._unlistable):
            for name in names:
                if name.startswith("."):
                    found += self._unfinished(Path(folder) / name)
        return sorted(found, key=lambda write: (write.key, write.token))

    def discard(self, write: UnfinishedWrite) -> None:
        """Unlink a temporary file; one that is gone meanwhile is no error."""
        path = self._path(write.key).with_name(Path(write.token).name)
        if not path.name.startswith("."):
            raise StorageError(f"{self.url}/{write.key}: token {write.token!r}: must name a temporary file")
        try:
            path.unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise _explained(error, f"{self.url}/{write.key}: cannot discard {path.name}") from error
        with suppress(OSError):
            path.parent.rmdir()

    def local_path(self, key: str) -> Path | None:
        """Return the file behind the key."""
        return self._path(key)

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    def _check_inside(self, path: Path) -> None:
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise IntegrityError(f"{path}: a link leads out of the store; put the object itself there")

    def _scan(self, prefix: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._path(prefix)) as entries:
                return [entry for entry in entries if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StoreUnavailable(f"{self.url}/{prefix}: cannot list: {error}") from error

    def _unfinished(self, path: Path) -> Iterator[UnfinishedWrite]:
        with suppress(FileNotFoundError):
            found = path.stat()
            key = f"{path.parent.relative_to(self._root).as_posix()}/{path.name[1:].rpartition('.')[0]}"
            if _is_key(key):
                age_seconds = max(0.0, time.time() - found.st_mtime)
                yield UnfinishedWrite(key=key, bytes=found.st_size, age_seconds=age_seconds, token=path.name)

    def _unlistable(self, error: OSError) -> None:
        # A folder that is absent or vanished meanwhile holds nothing; one that may not be read could hold anything.
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise _explained(error, f"{self.url}: cannot list {error.filename}") from error

    @contextmanager
    def _temporary(self, path: Path) -> Iterator[tuple[BinaryIO, Path]]:
        temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}"
        try:
            with _opened(temporary) as file:
                yield file, temporary
        except OSError as error:
            raise _explained(error, f"{self.url}: cannot write {path.name}") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _is_key(key: str) -> bool:
    try:
        checked_key(key)
    except StorageError:
        return False
    return True


def _opened(temporary: Path) -> BinaryIO:
    """Open the temporary file; `delete` of a last object may take the folder away in between, so more than once."""
    for _ in range(_OPEN_TRIES):
        _make_folder(temporary.parent)
        with suppress(FileNotFoundError):
            return temporary.open("xb")
    return temporary.open("xb")


def _make_folder(folder: Path) -> None:
    """Make the folder and those above it, each on disk before anything is promised to be in it."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
    except FileNotFoundError:
        return
    with suppress(FileNotFoundError, PermissionError):
        _fsync_folder(folder.parent)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(error: OSError, doing: str) -> StorageError:
    hint = {
        errno.EACCES: "make it writable or choose another --store",
        errno.EROFS: "the file system is read-only; choose another --store",
        errno.ENOSPC: "the disk is full; free space and run the same command again",
        errno.ENOTDIR: "a file stands where the store's folder should be; choose another --store",
        errno.EEXIST: "a file stands where the store's folder should be; choose another --store",
        errno.EPERM: "this file system may not support hard links, which the log needs; choose another --store",
    }.get(error.errno or 0, "see the cause")
    return StoreUnavailable(f"{doing}: {error} ({hint})")
