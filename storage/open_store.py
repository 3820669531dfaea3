"""From a URL to a store: the one place that knows which scheme is served by which class."""

import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

from storage.errors import StorageError
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore

_MEMORY_STORES: dict[str, MemoryStore] = {}
_MEMORY_LOCK = threading.Lock()


def open_store(url: str) -> ObjectStore:
    """Open `./folder`, `file://…`, `memory://name` or any fsspec URL such as `s3://bucket/prefix`.

    The same memory URL is the same store within a process. Raises `StorageError` on an empty URL or one that
    carries credentials, which belong to the environment.
    """
    if not url:
        raise StorageError("store '': must be a folder or a URL such as ./cairn-store or s3://bucket/prefix")
    if "://" not in url:
        return LocalStore(Path(url).expanduser())
    parts = urlsplit(url)
    if parts.password or (parts.username and parts.scheme != "abfs"):
        raise StorageError("store URL carries credentials: put them into the environment or the credentials file")
    if parts.scheme == "file":
        return LocalStore(Path(unquote(parts.path)))
    if parts.scheme == "memory":
        with _MEMORY_LOCK:
            return _MEMORY_STORES.setdefault(parts.netloc + parts.path, MemoryStore(parts.netloc + parts.path))
    from storage.remote_store import RemoteStore

    return RemoteStore(url)
