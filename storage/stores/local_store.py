"""A store in a local folder, with an atomic create-if-absent that survives power loss.

fsspec's local `mode='create'` is exists-then-open, so not atomic. Temporary names start with a dot; keys do not.
Below the root, nothing is written or deleted through a symbolic link, and links are followed only within it.
"""

import errno
import fcntl
import mmap
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cairn.storage.errors import IntegrityError, NotDurable, ObjectMissing, StorageError, StoreFull, StoreUnavailable
from cairn.storage.stores import local_disk, object_store, regular_file

BLOCK_BYTES = 4 * 1024 * 1024
"""Enough for one request to keep a disk busy; a multiple of every disk's block."""
_ALONE_BYTES = 1024 * 1024
"""Smaller chunks are gathered: a request costs more than copying them."""
_ABSENT = (FileNotFoundError, NotADirectoryError)
_ESCAPED = str.maketrans({"%": "%25", "?": "%3F", "#": "%23"})


def forget_cached_bytes(path: Path) -> None:
    """Have the next read of a file come from its disk and not from memory, where the system can be asked for that."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class LocalStore(object_store.ObjectStore):
    """An `ObjectStore` over files below one root folder."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()  # created by the first write
        self._synced = set[Path]()  # folders whose names this process has brought to disk

    @property
    def url(self) -> str:
        return f"file://{str(self._root).translate(_ESCAPED)}"

    def read(self, key: str, *, at_most_bytes: int = object_store.MAX_READ_BYTES) -> bytes:
        data = bytearray()
        for chunk in self.read_chunks(key):
            data += chunk
            if len(data) > at_most_bytes:
                raise object_store.too_large(f"{self.url}/{key}", at_most_bytes)
        return bytes(data)

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes in chunks; raises ObjectMissing."""
        with self._reading(key) as file:
            size = os.fstat(file.fileno()).st_size
            most_bytes = min(size + 1, object_store.READ_CHUNK_BYTES)  # a large buffer costs more
            while chunk := file.read(most_bytes):
                yield chunk

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        """Fill `into` from `start`; raises ObjectMissing."""
        filled = 0
        with self._reading(key) as file:
            file.seek(start)
            while count := file.readinto(into[filled:]):
                filled += count
        return filled

    @contextmanager
    def _reading(self, key: str) -> Iterator[FileIO]:
        path = self.local_path(key)
        try:
            with os.fdopen(regular_file.open_descriptor(path), "rb", buffering=0) as file:
                yield file
        except regular_file.NotRegularFile as foreign:
            raise IntegrityError(f"{path}: is not a regular file; remove it") from foreign
        except (*_ABSENT, IsADirectoryError) as missing:
            raise ObjectMissing(f"{self.url}/{key}: no such object") from missing
        except OSError as error:
            raise local_disk.store_error(error, f"{self.url}/{key}: cannot read") from error

    def create(self, key: str, data: bytes) -> bool:
        """Create the object if it is absent, else return False; NotDurable if it is there but its folder not synced.

        On a full disk it is written into the room that `reserve` has set aside.
        """
        for is_full in (False, *[True] * local_disk.FILES):
            try:
                return self._create(self._writable_path(key), key, data, is_full)
            except StoreFull as error:
                full = error
        raise full

    def _create(self, path: Path, key: str, data: bytes, is_full: bool) -> bool:
        with self._temporary_file(path, is_full) as (file, temporary):
            file.write(data)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
            try:
                local_disk.link(temporary, path)
            except FileExistsError:
                return False
            try:
                fsync_path(path.parent)
            except OSError as error:
                problem = f"is visible, but the fsync of its folder failed, so a power cut may take it back: {error}"
                advice = "nothing is acknowledged: check the disk, then run the same command again"
                raise NotDurable(f"{self.url}/{key}: {problem}; {advice}") from error
            return True

    def reserve(self) -> None:
        local_disk.fill_reserve(self._root)

    def write(self, key: str, data: bytes) -> None:
        self.write_stream(key, [data])

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write chunks as one object, visible only when complete and on disk; returns its bytes."""
        path = self._writable_path(key)
        with self._temporary_file(path) as (file, temporary):
            size_bytes = write_stream(file.fileno(), chunks)
            os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_path(path.parent)
        return size_bytes

    def keys(self, prefix: str) -> list[str]:
        found = ((folder, name) for folder, names in self._walk(prefix) for name in names)
        return sorted(f"{folder}/{name}" for folder, name in found if object_store.is_key(name))

    def folders(self, prefix: str) -> list[str]:
        return sorted(f"{prefix}/{entry.name}" for entry in self._scan(prefix) if entry.is_dir())

    def first(self, prefix: str) -> str | None:
        names = [entry.name for entry in self._scan(prefix) if entry.is_file()]
        return f"{prefix}/{min(names)}" if names else None

    def size(self, key: str) -> int | None:
        with local_disk.convert_errors(f"{self.url}/{key}: cannot stat"), suppress(*_ABSENT):
            found = self.local_path(key).stat()
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def age_seconds(self, key: str) -> float | None:
        """Return the seconds between the object's time and that of a file made now beside it, on one server's clock."""
        with suppress(*_ABSENT, StoreUnavailable):
            written = self.local_path(key).stat().st_mtime
            with self._temporary_file(self._writable_path(key)) as (file, _):
                return os.fstat(file.fileno()).st_mtime - written
        return None

    def delete(self, key: str) -> None:
        """Delete the object if it exists, and its folder if that is now empty."""
        self._unlink(self._writable_path(key), f"{self.url}/{key}: cannot delete")

    def unfinished(self, prefix: str) -> list[object_store.UnfinishedWrite]:
        """Return the temporary files below the folder `prefix`; their age is by this machine's clock."""
        found: list[object_store.UnfinishedWrite] = []
        for folder, name in ((folder, name) for folder, names in self._walk(prefix) for name in names):
            if name.startswith(".") and object_store.is_key(key := f"{folder}/{name[1:].rpartition('.')[0]}"):
                with suppress(FileNotFoundError):
                    status = os.lstat(self._root / folder / name)
                    age_seconds = max(0.0, time.time() - status.st_mtime)
                    size = status.st_size
                    found.append(object_store.UnfinishedWrite(key=key, bytes=size, age_seconds=age_seconds, token=name))
        return sorted(found, key=lambda write: (write.key, write.token))

    def discard(self, write: object_store.UnfinishedWrite) -> None:
        """Delete a temporary file if it still exists."""
        path = self._writable_path(write.key).with_name(Path(write.token).name)
        if not path.name.startswith("."):
            raise StorageError(f"{self.url}/{write.key}: token {write.token!r}: must name a temporary file")
        self._unlink(path, f"{self.url}/{write.key}: cannot discard {path.name}")

    def local_path(self, key: str) -> Path:
        """Return the object's file; raises IntegrityError if a link leads out of the store."""
        path = self._root / object_store.check_key(key)
        if self._first_link(key) is not None and not path.resolve().is_relative_to(self._root.resolve()):
            raise IntegrityError(f"{path}: a link leads out of the store; put the object itself there")
        return path

    def _writable_path(self, key: str) -> Path:
        # The object itself may be a link: then the link is created, replaced or deleted, and not its target.
        path = self._root / object_store.check_key(key)
        if link := self._first_link(key.rpartition("/")[0]):
            raise IntegrityError(f"{link}: is a link, and nothing is written through one; put the folder itself there")
        return path

    def _first_link(self, key: str) -> str | None:
        paths = (f"{self._root}/{part}" for part in accumulate(key.split("/"), "{}/{}".format))
        return next(filter(os.path.islink, paths), None)

    def _scan(self, prefix: str) -> list[os.DirEntry[str]]:
        path, problem = self.local_path(prefix), f"{self.url}/{prefix}: cannot list"
        with local_disk.convert_errors(problem), suppress(*_ABSENT), os.scandir(path) as entries:
            return [entry for entry in entries if object_store.is_key(entry.name)]
        return []

    def _walk(self, prefix: str) -> Iterator[tuple[str, list[str]]]:
        def refuse(error: OSError) -> None:
            # An absent folder holds nothing; one that cannot be listed could hold anything.
            if not isinstance(error, _ABSENT):
                raise local_disk.store_error(error, f"{self.url}: cannot list {error.filename}") from error

        for folder, folders, names in os.walk(self.local_path(prefix), onerror=refuse):
            folders[:] = filter(object_store.is_key, folders)
            yield Path(folder).relative_to(self._root).as_posix(), names

    def _unlink(self, path: Path, problem: str) -> None:
        with local_disk.convert_errors(problem), suppress(NotADirectoryError):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()

    @contextmanager
    def _temporary_file(self, path: Path, is_full: bool = False) -> Iterator[tuple[BinaryIO, Path]]:
        temporary, problem = path.parent / f".{path.name}.{uuid.uuid4().hex}", f"{self.url}: cannot write {path.name}"
        try:
            with local_disk.convert_errors(problem), self._open_temporary(temporary, is_full) as file:
                yield file, temporary
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _open_temporary(self, temporary: Path, is_full: bool) -> BinaryIO:
        if is_full:
            if local_disk.take_reserve(self._root, temporary):
                return open(temporary, "r+b")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # A concurrent `delete` of the last object may remove the folder between the two calls; eight of them, each as
        # busy as this one, have done so nine times in a row.
        for _ in range(100):
            self._make_folder(temporary.parent)
            with suppress(FileNotFoundError):
                return open(temporary, "xb", opener=local_disk.open_0664)
        return open(temporary, "xb", opener=local_disk.open_0664)

    def _make_folder(self, folder: Path) -> None:
        # The process that made a folder may have died before it synced its name: each process does so once.
        if folder.is_dir() and (folder in self._synced or not folder.is_relative_to(self._root)):
            return
        self._make_folder(folder.parent)
        try:
            folder.mkdir(mode=0o775)
        except FileExistsError:
            with suppress(FileNotFoundError):  # removed again at once: the caller tries again
                if not stat.S_ISDIR(os.lstat(folder).st_mode) and not folder.is_dir():
                    raise
        except FileNotFoundError:
            return
        try:
            fsync_path(folder.parent)
            self._synced.add(folder)
        except (FileNotFoundError, PermissionError):
            return
        except OSError:
            with suppress(OSError):
                folder.rmdir()  # a retry makes it anew: an fsync after a failed one proves nothing of the first
            raise


def fsync_path(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_stream(descriptor: int, chunks: Iterable[bytes | memoryview]) -> int:
    """Write chunks to a new file, past the page cache (O_DIRECT, open(2)) where that is possible; return the bytes."""
    # Past it a checkpoint costs the processor at most one copy, and the disk is never idle.
    written_bytes, filled, is_direct = 0, 0, hasattr(os, "O_DIRECT")
    # Memory of its own pages, as direct writes require; a small stream touches little of it.
    block = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
    for chunk in chunks:
        source = np.frombuffer(chunk, np.uint8)
        if source.size >= _ALONE_BYTES and not (filled | source.size | source.ctypes.data) % object_store.PAGE_BYTES:
            is_direct = _write(descriptor, (block.data[:filled], source.data), is_direct)
            written_bytes, filled = written_bytes + filled + source.size, 0
            continue
        while source.size:
            count = min(source.size, BLOCK_BYTES - filled)
            block[filled : filled + count] = source[:count]
            filled, source = filled + count, source[count:]
            if filled == BLOCK_BYTES:
                is_direct = _write(descriptor, (block.data,), is_direct)
                written_bytes, filled = written_bytes + filled, 0
    _write(descriptor, (block.data[:filled],), False)
    return written_bytes + filled


def _write(descriptor: int, pages: Sequence[memoryview], is_direct: bool) -> bool:
    """Write memory, past the cache if `is_direct`; returns False if that is not wanted or not possible here."""
    count, flags = 0, fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        if is_direct:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            count = os.writev(descriptor, pages)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    is_whole = count == sum(map(len, pages))
    for part in pages:
        left, count = part[count:], max(0, count - len(part))
        while left:
            left = left[os.write(descriptor, left) :]
    return is_whole
