"""Copies of remote objects on this machine under their SHA-256, least recently used first out of a bounded folder.

A copy in use is not deleted: its process holds a lock (flock(2)) on a lease file that lists it, and the lock ends with
the process. Copies in use may exceed the bound. A lost lease costs a download, because a mapped file outlives its name.
"""

import fcntl
import os
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.errors import StorageError
from storage.stores.object_store import ObjectStore
from storage.stores.verified_object import ExpectedObject, check_object, describe_file, save_verified

VARIABLE = "CAIRN_CACHE_BYTES"
DEFAULT_CACHE_BYTES = 50_000_000_000
_LEASES = "leases"
_COPY = re.compile(r"[0-9a-f]{64}\Z")
_TEMPORARY = re.compile(r"\.([0-9a-f]{32})-[0-9a-f]{32}\Z")


def cache_bytes(environment: Mapping[str, str]) -> int:
    """Return the cache's bound in bytes; raises StorageError if CAIRN_CACHE_BYTES is not a number."""
    given = environment.get(VARIABLE, "").strip() or str(DEFAULT_CACHE_BYTES)
    if not (given.isascii() and given.isdigit()):
        raise StorageError(f"{VARIABLE} = {given!r}: must be a whole number of bytes, 0 or more")
    return int(given)


class SnapshotCache:
    """A folder of verified copies; safe for many threads and processes at once."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._lock = threading.Lock()
        self._lease: _Lease | None = None

    def fetch(self, store: ObjectStore, expected: ExpectedObject) -> Path:
        """Return a verified file: a local store's own, else a copy, kept while this is used; raises IntegrityError."""
        own = store.local_path(expected.key)
        if own is not None:
            check_object(store, expected)
            return own
        path = self._folder / expected.sha256
        with self._lock, _lock_folder(self._folder):
            self._lease = self._lease or _Lease(self._folder / _LEASES)
            self._lease.add(expected.sha256)
            temporary = self._folder / f".{self._lease.name}-{uuid.uuid4().hex}"
        if _is_intact(path, expected):
            with suppress(FileNotFoundError):  # the folder may be emptied by hand
                os.utime(path)
            return path
        self._make_room(expected.bytes)
        try:
            save_verified(store, expected, temporary)
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return path

    def drop_damaged(self, expected: ExpectedObject) -> bool:
        """Delete the copy if it is damaged; returns whether it was."""
        path = self._folder / expected.sha256
        is_damaged = path.is_file() and not _is_intact(path, expected)
        if is_damaged:
            path.unlink(missing_ok=True)
        return is_damaged

    def _make_room(self, needed_bytes: int) -> None:
        """Delete the least recently used copies that are not in use, until the object fits."""
        with _lock_folder(self._folder):
            living = _living_leases(self._folder / _LEASES)
            copies = []
            for item in os.scandir(self._folder):
                if _COPY.match(item.name):
                    status = item.stat()
                    copies.append((status.st_mtime_ns, status.st_size, Path(item.path)))
                elif (lease := _TEMPORARY.match(item.name)) and lease[1] not in living:
                    Path(item.path).unlink(missing_ok=True)  # the download of a dead process
            in_use = {sha256 for listed in living.values() for sha256 in listed}
            excess_bytes = sum(size_bytes for _, size_bytes, _ in copies) + needed_bytes - self._limit_bytes
            for _, size_bytes, path in sorted(copies):
                if excess_bytes > 0 and path.name not in in_use:
                    path.unlink(missing_ok=True)
                    excess_bytes -= size_bytes


class _Lease:
    """A locked file that lists copies in use; the lock ends with its process or with this object."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        _living_leases(folder)  # deletes dead leases, also in processes that never need room
        self.name = uuid.uuid4().hex
        self._file = (folder / self.name).open("xb", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._listed = set[str]()

    def add(self, sha256: str) -> None:
        if sha256 not in self._listed:
            self._listed.add(sha256)
            self._file.write(f"{sha256}\n".encode())

    def __del__(self) -> None:
        self._file.close()


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _living_leases(folder: Path) -> dict[str, list[str]]:
    """Return the hashes of every living lease by its name; deletes dead leases."""
    living = {}
    for path in folder.iterdir():
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                living[path.name] = file.read().decode("ascii", "replace").split()
    return living


def _is_intact(path: Path, expected: ExpectedObject) -> bool:
    try:
        found = describe_file(path)
    except FileNotFoundError:
        return False
    return (found.bytes, found.sha256) == (expected.bytes, expected.sha256)
