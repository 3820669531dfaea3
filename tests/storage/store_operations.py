"""Every operation of a store by name, and the keys that none of them may follow."""

from collections.abc import Callable
from typing import Any

import pytest

from cairn.storage.errors import StorageError
from cairn.storage.stores.object_store import UnfinishedWrite

OPERATIONS: dict[str, Callable[[Any, str], object]] = {
    "read": lambda store, key: store.read(key),
    "read_chunks": lambda store, key: list(store.read_chunks(key)),
    "read_range": lambda store, key: store.read_range(key, 0, memoryview(bytearray(1))),
    "create": lambda store, key: store.create(key, b"x"),
    "write": lambda store, key: store.write(key, b"x"),
    "write_stream": lambda store, key: store.write_stream(key, [b"x"]),
    "keys": lambda store, key: store.keys(key),
    "folders": lambda store, key: store.folders(key),
    "first": lambda store, key: store.first(key),
    "size": lambda store, key: store.size(key),
    "sizes": lambda store, key: store.sizes(key),
    "age_seconds": lambda store, key: store.age_seconds(key),
    "delete": lambda store, key: store.delete(key),
    "delete_all": lambda store, key: store.delete_all([key]),
    "unfinished": lambda store, key: store.unfinished(key),
    "discard": lambda store, key: store.discard(UnfinishedWrite(key=key, bytes=0, age_seconds=0.0, token=".t")),
    "local_path": lambda store, key: store.local_path(key),
}
BAD_KEYS = [
    "", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", "a//b", "a/", "./a", ".hidden", "a/.b",
    "a\\b", "a\0b", "a\n", "~/x", "a b", "C:/x", "-rf",
]  # fmt: skip


def refuse_bad_keys(store: Any) -> None:
    """Every operation refuses each of the bad keys."""
    for operation, act in OPERATIONS.items():
        for key in BAD_KEYS:
            try:
                act(store, key)
            except StorageError as error:
                assert "each part between '/' must be" in str(error), (store.url, operation, key)
            else:
                pytest.fail(f"{operation} of {store.url} accepts {key!r}")
