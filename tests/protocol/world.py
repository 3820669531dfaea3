"""A small world: a store that watches every deletion and keeps what torn writers leave, copied quickly.

Owns copies and witnesses. Refuses to know scenarios and faults: `FaultyStore` or the simulator wrap a `WatchedStore`.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore, UnfinishedWrite
from tests.clouds.servers import CLOUDS, cloud_server
from tests.memory_store import MemoryStore
from tests.protocol.raw_history import prove_deletable, require
from tests.storage.faulty_store import Death, delete_one_by_one


@dataclass
class Ledger:
    """What was acknowledged to somebody, what is broken on purpose, who is dead, how much a sweep keeps.

    In `mourned` are those that somebody took for dead, rightly or not, in `missing` what a copy has yet to bring.
    """

    entries: dict[str, str] = field(default_factory=dict)
    committed: dict[str, str] = field(default_factory=dict)
    promised: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    condemned: set[str] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    mourned: set[int] = field(default_factory=set)
    missing: dict[str, bytes] = field(default_factory=dict)
    keep_last: int = 1

    def acknowledge(self, what: str) -> None:
        """Note in words that an operation was answered with success."""
        self.promised.append(what)


class WatchedStore:
    """Wraps a real store: each deletion must be provably free at its moment; torn uploads leave unfinished writes."""

    def __init__(self, inner: Any, leftovers: Iterable[UnfinishedWrite] = ()) -> None:
        self.inner, self.leftovers = inner, list(leftovers)
        self.torn, self._known = count(len(self.leftovers)), dict[str, bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def delete(self, key: str) -> None:
        if self.inner.size(key) is not None:
            prove_deletable(self.inner, key, self._known)
        self.inner.delete(key)

    delete_all = delete_one_by_one

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        try:
            written: int = self.inner.write_stream(key, chunks)
        except Death:
            self.leftovers.append(
                UnfinishedWrite(key=key, bytes=1, age_seconds=1.0, token=f".torn-{next(self.torn):04d}")
            )
            raise
        return written

    def unfinished(self, prefix: str) -> list[UnfinishedWrite]:
        own = [write for write in self.leftovers if write.key.startswith(f"{prefix}/")]
        return sorted([*self.inner.unfinished(prefix), *own], key=lambda write: (write.key, write.token))

    def discard(self, write: UnfinishedWrite) -> None:
        if write in self.leftovers:
            prove_deletable(self.inner, write.key, self._known)
            self.leftovers.remove(write)
        else:
            self.inner.discard(write)


@dataclass(frozen=True)
class Snapshot:
    """The content of a store, to begin from again and again."""

    objects: dict[str, bytes]
    leftovers: tuple[UnfinishedWrite, ...]
    ledger: Ledger


class Copies:
    """Fresh stores of one kind that hold a snapshot; local ones by hard links, since objects are never changed.

    Those of a cloud's server are prefixes of one bucket.
    """

    def __init__(self, kind: str, folder: Path, snapshot: Snapshot) -> None:
        self.kind, self.folder, self.snapshot, self.number = kind, folder, snapshot, 0
        self._base = folder / "base"
        if kind == "local":
            base = LocalStore(self._base)
            for key, data in snapshot.objects.items():
                base.write(key, data)
        self._folders = sorted({key.rsplit("/", 1)[0] for key in snapshot.objects})

    def fresh(self) -> WatchedStore:
        """Return a new copy; the one before is gone."""
        if self.kind == "memory":
            return WatchedStore(copied(self.snapshot.objects), self.snapshot.leftovers)
        if self.kind in CLOUDS:
            remote = cloud_server(self.kind, self.folder).store()
            for key, data in self.snapshot.objects.items():
                remote.write(key, data)
            return WatchedStore(remote, self.snapshot.leftovers)
        shutil.rmtree(self.folder / f"copy-{self.number}", ignore_errors=True)
        self.number += 1
        target = self.folder / f"copy-{self.number}"
        for name in self._folders:
            (target / name).mkdir(parents=True, exist_ok=True)
        for key in self.snapshot.objects:
            os.link(self._base / key, target / key)
        return WatchedStore(LocalStore(target), self.snapshot.leftovers)


def copied(objects: dict[str, bytes]) -> MemoryStore:
    """Return a memory store with these objects."""
    store = MemoryStore("copy")
    store._objects.update(objects)
    return store


def take_snapshot(store: WatchedStore, ledger: Ledger) -> Snapshot:
    """Return the content of a store in memory."""
    return Snapshot(dict(store.inner._objects), tuple(store.leftovers), ledger)


def bring_missing(store: Any, ledger: Ledger) -> None:
    """Let the copy that is under way come to its end: what it brings is nowhere another one by now."""
    while ledger.missing:
        key, data = next(iter(ledger.missing.items()))
        require(store.create(key, data) or store.read(key) == data, "a hole is not written into", key)
        ledger.missing.pop(key, None)


def as_store(store: Any) -> ObjectStore:
    """Tell the type checker that a wrapper is the store it wraps."""
    found: ObjectStore = store
    return found
