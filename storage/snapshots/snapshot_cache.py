"""Copies of remote objects on this machine under their SHA-256, least recently used first out of a bounded folder.

A copy that was fetched within the last hour stays, also beyond the bound: its reader may not have opened it yet. One
that is open or mapped may go, because a file outlives its name.
"""

import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.errors import StorageError
from storage.stores.object_store import ObjectStore
from storage.stores.verified_object import ExpectedObject, check_object, describe_file, save_verified

VARIABLE = "CAIRN_CACHE_BYTES"
DEFAULT_CACHE_BYTES = 50_000_000_000
_YOUNG_SECONDS = 3600.0
_COPY, _TEMPORARY = re.compile(r"[0-9a-f]{64}\Z"), re.compile(r"\.[0-9a-f]{64}-[0-9a-f]{32}\Z")


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

    def fetch(self, store: ObjectStore, expected: ExpectedObject) -> Path:
        """Return a verified file: a local store's own, else a copy, kept for an hour; raises IntegrityError."""
        own = store.local_path(expected.key)
        if own is not None:
            check_object(store, expected)
            return own
        path, temporary = self._folder / expected.sha256, self._folder / f".{expected.sha256}-{uuid.uuid4().hex}"
        with _lock_folder(self._folder), suppress(FileNotFoundError):
            os.utime(path)  # nobody deletes it from now on
        if _is_intact(path, expected):
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
        """Delete the least recently used copies that are not young, until the object fits."""
        with _lock_folder(self._folder):
            copies, young_from = [], time.time() - _YOUNG_SECONDS
            for item in os.scandir(self._folder):
                with suppress(FileNotFoundError):  # a download has come to its end
                    status = item.stat()
                    if _COPY.match(item.name):
                        copies.append((status.st_mtime, status.st_size, Path(item.path)))
                    elif _TEMPORARY.match(item.name) and status.st_mtime < young_from:
                        Path(item.path).unlink()  # of a dead process
            excess_bytes = sum(size_bytes for _, size_bytes, _ in copies) + needed_bytes - self._limit_bytes
            for used_at, size_bytes, path in sorted(copies):
                if excess_bytes > 0 and used_at < young_from:
                    path.unlink(missing_ok=True)
                    excess_bytes -= size_bytes


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_intact(path: Path, expected: ExpectedObject) -> bool:
    try:
        found = describe_file(path)
    except FileNotFoundError:
        return False
    return (found.bytes, found.sha256) == (expected.bytes, expected.sha256)
