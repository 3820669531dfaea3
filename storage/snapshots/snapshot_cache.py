"""Objects of data snapshots kept on this machine under their hash, within a bound on bytes.

Owns the folder: what may be believed of a copy (it is hashed again at every start), and which copy goes when there is
no more room: the one used longest ago that no living process uses. A use is a lease file that its process keeps locked
(flock(2)), so that it ends with the process however that ends. Leases spare downloads and are no safety: a file that
is removed while it is mapped stays until the last map of it is gone (unlink(2)), and one that is missing is fetched
again. The bound gives way to what is in use. Refuses to know snapshots and tokens.
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
from storage.stores.verified_object import ExpectedObject, describe_file, save_verified

VARIABLE = "CAIRN_CACHE_BYTES"
LEASES = "leases"
DEFAULT_CACHE_BYTES = 50_000_000_000
_COPY = re.compile(r"[0-9a-f]{64}\Z")
_TEMPORARY = re.compile(r"\.([0-9a-f]{32})-[0-9a-f]{32}\Z")


def cache_bytes(environment: Mapping[str, str]) -> int:
    """Return the bound that the environment sets, else `DEFAULT_CACHE_BYTES`; raises StorageError for no number."""
    given = environment.get(VARIABLE, "").strip()
    if not given:
        return DEFAULT_CACHE_BYTES
    if not (given.isascii() and given.isdigit()):
        raise StorageError(f"{VARIABLE} = {given!r}: must be a whole number of bytes, 0 or more")
    return int(given)


class SnapshotCache:
    """A folder of verified copies; safe to use from many threads and processes at once."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        """Keep copies in `folder`, made when needed, of at most `limit_bytes` beyond what is in use."""
        self._folder, self._limit_bytes = folder, limit_bytes
        self._lock = threading.Lock()
        self._lease: _Lease | None = None

    def fetch(self, store: ObjectStore, promised: ExpectedObject) -> Path:
        """Return a verified copy of the object, downloaded where there is none that is sound.

        The copy stays while this cache is referred to. Raises IntegrityError where the store has other bytes.
        """
        path, temporary = self._folder / promised.sha256, self._leased(promised.sha256)
        if _is_sound(path, promised):
            with suppress(FileNotFoundError):  # a person who empties the folder
                os.utime(path)
            return path
        self._make_room(promised.bytes)
        try:
            save_verified(store, promised, temporary)
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return path

    def drop_damaged(self, promised: ExpectedObject) -> bool:
        """Delete the copy where it is no longer what its name says; True where there was such a one."""
        path = self._folder / promised.sha256
        if not path.is_file() or _is_sound(path, promised):
            return False
        path.unlink(missing_ok=True)
        return True

    def _leased(self, sha256: str) -> Path:
        """Put the object on this cache's lease; returns the name of a temporary file that is under the lease too."""
        with self._lock, _locked(self._folder):
            self._lease = self._lease or _Lease(self._folder / LEASES)
            self._lease.add(sha256)
            return self._folder / f".{self._lease.name}-{uuid.uuid4().hex}"

    def _make_room(self, needed_bytes: int) -> None:
        """Delete what was used longest ago until the object fits; what is in use stays."""
        with _locked(self._folder):
            living = _living_leases(self._folder / LEASES)
            copies = []
            for item in os.scandir(self._folder):
                if _COPY.match(item.name):
                    status = item.stat()
                    copies.append((status.st_mtime_ns, status.st_size, Path(item.path)))
                elif (lease := _TEMPORARY.match(item.name)) and lease[1] not in living:
                    Path(item.path).unlink(missing_ok=True)  # what a download left whose process is gone
            in_use = {sha256 for listed in living.values() for sha256 in listed}
            excess_bytes = sum(size_bytes for _, size_bytes, _ in copies) + needed_bytes - self._limit_bytes
            for _, size_bytes, path in sorted(copies):
                if excess_bytes > 0 and path.name not in in_use:
                    path.unlink(missing_ok=True)
                    excess_bytes -= size_bytes


class _Lease:
    """A locked file that lists what is in use; the lock ends with its process, or when nobody refers to it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        _living_leases(folder)  # sweeps the dead: starts that find all they need never make room
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
def _locked(folder: Path) -> Iterator[None]:
    """Let nobody lease or delete meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _living_leases(folder: Path) -> dict[str, list[str]]:
    """Return the hashes under every living lease by its name; dead leases are deleted."""
    living = {}
    for path in folder.iterdir():
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                living[path.name] = file.read().decode("ascii", "replace").split()
    return living


def _is_sound(path: Path, promised: ExpectedObject) -> bool:
    try:
        found = describe_file(path)
    except FileNotFoundError:
        return False
    return (found.bytes, found.sha256) == (promised.bytes, promised.sha256)
