"""A store in a folder of this machine, with a create that excludes and survives power loss.

create-if-absent is: temporary file in the same folder, fsync, hard link (EEXIST: somebody was first),
unlink, fsync of the folder. fsspec's local `mode='create'` is exists-then-open and does not exclude.
Temporary names start with a dot, which no key may, so readers never see them; what a killed writer leaves of them is
an unfinished write. The root itself may be a symbolic link. Below it the store is what lies in its folder: a link is
read only where it stays inside, nothing is written or deleted through one, and what is no ordinary file (a pipe, a
device) is never opened. Against somebody who swaps files for links between the look and the use only the folder's own
permissions help.
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
from storage.stores.object_store import (
    MOST_READ_BYTES,
    UnfinishedWrite,
    WrittenObject,
    checked_key,
    is_key,
    larger_than,
)

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

    def read(self, key: str, *, at_most_bytes: int = MOST_READ_BYTES) -> bytes:
        """Return the object's bytes; raise `ObjectMissing` where there is none, `IntegrityError` where it is larger."""
        pieces, size_bytes = list[bytes](), 0
        for piece in self.read_chunks(key):
            size_bytes += len(piece)
            if size_bytes > at_most_bytes:
                raise larger_than(f"{self.url}/{key}", at_most_bytes)
            pieces.append(piece)
        return b"".join(pieces)

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes piece by piece; raises `ObjectMissing` where there is none."""
        path = self._inside(key)
        try:
            with open(path, "rb", buffering=0, opener=_open_nonblocking) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise IntegrityError(f"{path}: is no ordinary file; take it away")
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as missing:
            raise ObjectMissing(f"{self.url}/{key}: no such object") from missing
        except OSError as error:
            raise StoreUnavailable(f"{self.url}/{key}: cannot read: {error}") from error

    def create(self, key: str, data: bytes) -> bool:
        """Create the object only if absent: True when this call made it."""
        path = self._unlinked(key)
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
        path, digest, size, begun = self._unlinked(key), hashlib.sha256(), 0, 0
        with self._temporary(path) as (file, temporary):
            for chunk in chunks:
                digest.update(chunk)
                size += file.write(chunk)
                begun = _begin_writing_back(file, begun, size)
            _flush(file)
            os.replace(temporary, path)
            _fsync_folder(path.parent)
        return WrittenObject(bytes=size, sha256=digest.hexdigest())

    def keys(self, prefix: str) -> list[str]:
        """Return all keys under the folder `prefix`, sorted."""
        found = []
        for folder, folders, names in os.walk(self._inside(prefix), onerror=self._unlistable):
            folders[:] = filter(is_key, folders)
            relative = Path(folder).relative_to(self._root).as_posix()
            found += [f"{relative}/{name}" for name in names if is_key(name)]
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
            found = self._inside(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _explained(error, f"{self.url}/{key}: cannot stat") from error
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def delete(self, key: str) -> None:
        """Delete the object if it is there, and its folder when that is left empty."""
        path = self._unlinked(key)
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
        for folder, _, names in os.walk(self._inside(prefix), onerror=self._unlistable):
            for name in names:
                if name.startswith("."):
                    found += self._unfinished(Path(folder) / name)
        return sorted(found, key=lambda write: (write.key, write.token))

    def discard(self, write: UnfinishedWrite) -> None:
        """Unlink a temporary file; one that is gone meanwhile is no error."""
        path = self._unlinked(write.key).with_name(Path(write.token).name)
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
        return self._inside(key)

    def _inside(self, key: str) -> Path:
        """Return where the key lies, for reading; raises `IntegrityError` where a link leads out of the store."""
        path = self._root / checked_key(key)
        if self._first_link(key) is not None and not path.resolve().is_relative_to(self._root.resolve()):
            raise IntegrityError(f"{path}: a link leads out of the store; put the object itself there")
        return path

    def _unlinked(self, key: str) -> Path:
        """Return where the key lies, for writing; raises `IntegrityError` where a folder on the way is a link.

        The object itself may be one: what is created, replaced or deleted is then the link, not what it points at.
        """
        path = self._root / checked_key(key)
        link = self._first_link(key.rpartition("/")[0])
        if link is not None:
            raise IntegrityError(f"{link}: is a link, and nothing is written through one; put the folder itself there")
        return path

    def _first_link(self, key: str) -> str | None:
        path = str(self._root)
        for segment in key.split("/") if key else ():
            path = f"{path}/{segment}"
            if os.path.islink(path):
                return path
        return None

    def _scan(self, prefix: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._inside(prefix)) as entries:
                return [entry for entry in entries if is_key(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StoreUnavailable(f"{self.url}/{prefix}: cannot list: {error}") from error

    def _unfinished(self, path: Path) -> Iterator[UnfinishedWrite]:
        with suppress(FileNotFoundError):
            found = path.lstat()
            key = f"{path.parent.relative_to(self._root).as_posix()}/{path.name[1:].rpartition('.')[0]}"
            if is_key(key):
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


def _open_0664(path: str, flags: int) -> int:
    """Whatever the umask allows: who may write to a store decides what is trained."""
    return os.open(path, flags, 0o664)


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _opened(temporary: Path) -> BinaryIO:
    """Open the temporary file; `delete` of a last object may take the folder away in between, so more than once."""
    for _ in range(_OPEN_TRIES):
        _make_folder(temporary.parent)
        with suppress(FileNotFoundError):
            return open(temporary, "xb", opener=_open_0664)
    return open(temporary, "xb", opener=_open_0664)


def _make_folder(folder: Path) -> None:
    """Make the folder and those above it, each on disk before anything is promised to be in it."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir(mode=0o775)
    except FileExistsError:
        if not folder.is_dir():
            raise
    except FileNotFoundError:
        return
    with suppress(FileNotFoundError, PermissionError):
        _fsync_folder(folder.parent)


def _begin_writing_back(file: BinaryIO, begun: int, size: int) -> int:
    """Let the disk begin with what was written since `begun`, so that it works while the rest is hashed.

    Linux begins to write dirty pages that are not wanted any more, and keeps them (posix_fadvise(2), mm/fadvise.c).
    """
    if size - begun < _CHUNK_BYTES or not hasattr(os, "posix_fadvise"):
        return begun
    with suppress(OSError):
        os.posix_fadvise(file.fileno(), begun, size - begun, os.POSIX_FADV_DONTNEED)
    return size


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
