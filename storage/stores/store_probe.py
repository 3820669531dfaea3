"""Tests a store by real requests before it keeps a run log: create-if-absent must be atomic, lists must be ordered.

A store that checks first and writes then is only caught in between. Servers are caught by many creators at once, file
systems in this process by two creators that run in step, line by line.
"""

import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from cairn.storage.errors import ObjectMissing, StorageError, StoreRefused, StoreUnavailable, StoreUnsound
from cairn.storage.stores import local_disk
from cairn.storage.stores.object_store import ObjectStore

_STEP_SECONDS = 0.02
"""How long one of two creators in step waits for the other, which may be waiting for a lock that the first one has."""
_MISSED_STEPS = 16
"""How often a creator goes on alone before both run freely: they wait for a server, not for each other."""
_PADDING = bytes(65_536)
"""Makes a body that takes a while to arrive, between a server's check and its write."""
_STALE_SECONDS = 3600.0
"""No probe takes so long: what is older was left by one that was killed."""
_NOT_ATOMIC = "so create-if-absent is not atomic"


def probe_store(store: ObjectStore, *, creators: int = 8, rounds: int = 2) -> str:
    """Race creates of one key, then check what else the run log needs; raises StoreUnsound, or StoreUnavailable.

    Returns why objects cannot be deleted, empty if they can: then retention frees nothing.
    """
    with suppress(StorageError):  # what probes that were killed have left
        for write in store.unfinished("probe"):
            if write.age_seconds > _STALE_SECONDS:
                store.discard(write)
        for key in store.keys("probe"):
            if (store.age_seconds(key) or 0.0) > _STALE_SECONDS:
                store.delete(key)
    folder = f"probe/{uuid.uuid4().hex}"
    with _delete_afterwards(store, f"{folder}/written"):
        store.write(f"{folder}/written", b"written")
        with ThreadPoolExecutor(creators) as pool:
            for number in range(rounds + 2):
                in_step = number >= rounds
                with _delete_afterwards(store, key := f"{folder}/race-{number}"):
                    _check_race(store, key, 2 if in_step else creators, pool, in_step=in_step)
        if _read(store, f"{folder}/written") != b"written":
            raise _unsound(store, "an object is not there, or is another one, after it was written")
    earlier, later = f"{folder}/1", f"{folder}/2"
    with _delete_afterwards(store, earlier, later):
        for key in (later, earlier):
            try:
                store.create(key, b"first")
            except StoreUnavailable:
                if _read(store, key) is None:
                    raise
            if _read(store, key) != b"first":
                raise _unsound(store, "an object is not there, or is another one, right after it was created")
            with suppress(StoreUnavailable):
                if key == later and (store.create(key, b"second") or _read(store, key) != b"first"):
                    raise _unsound(store, f"{_second_succeeded(store)}, {_NOT_ATOMIC}")
            if (found := store.first(folder)) != key:
                problem = f"lists names out of order or not fresh: the first in {folder} is {found}, must be {key}"
                raise _unsound(store, problem)
        try:
            store.delete(earlier)
        except StoreUnavailable as refused:
            return str(refused)
    return ""


def require_links(store: ObjectStore) -> None:
    """Raise StoreUnsound if the store is a folder whose file system makes no hard links; leaves nothing, no store."""
    if (path := store.local_path("probe")) is None:
        return
    folder = next(parent for parent in path.parents if parent.is_dir())
    try:
        with suppress(OSError), tempfile.TemporaryDirectory(prefix=".cairn-", dir=folder) as there:
            file = Path(there) / "file"
            file.touch()
            local_disk.link(file, file.with_name("link"))
    except StoreRefused as refused:
        raise _unsound(store, str(refused)) from refused


def _check_race(store: ObjectStore, key: str, creators: int, pool: ThreadPoolExecutor, *, in_step: bool) -> None:
    barrier, steps = threading.Barrier(creators), _Steps()
    bodies = [b"%d" % number + _PADDING for number in range(creators)]

    def create(body: bytes) -> bool | StoreUnavailable:
        barrier.wait()
        try:
            with steps.together() if in_step else nullcontext():
                return store.create(key, body)
        except StoreUnavailable as error:
            return error

    answers = list(pool.map(create, bodies))
    for refused in (answer for answer in answers if isinstance(answer, StoreRefused)):
        how = "rejects If-None-Match" if store.local_path(key) is None else "makes no new names"
        problem = f"{how}: a plain write succeeded, a create did not ({refused})"
        raise _unsound(store, problem) from refused
    winners = [body for body, answer in zip(bodies, answers, strict=True) if answer is True]
    if len(winners) == creators > 2:
        raise _unsound(store, f"{_second_succeeded(store)}, as did all {creators} racing ones, {_NOT_ATOMIC}")
    if len(winners) > 1:
        raise _unsound(store, f"told {len(winners)} of {creators} racing creators they had won, {_NOT_ATOMIC}")
    found = _read(store, key)
    unknown = {body: answer for body, answer in zip(bodies, answers, strict=True) if not isinstance(answer, bool)}
    if found is None and not winners and unknown:
        raise next(iter(unknown.values()))
    # A creator whose answer is unknown may have won; a creator that got False has not.
    if found not in (winners or unknown):
        raise _unsound(store, f"keeps other bytes than the winning creator's, {_NOT_ATOMIC}")


class _Steps:
    """Lets two threads run in step: before every line of Python each waits for the other."""

    def __init__(self) -> None:
        self._barrier, self._left = threading.Barrier(2), _MISSED_STEPS

    @contextmanager
    def together(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._wait)
        try:
            yield
        finally:
            sys.settrace(before)
            self._left = 0
            self._barrier.abort()

    def _wait(self, *_: object) -> Callable[..., Any]:
        if self._left > 0:
            try:
                self._barrier.wait(_STEP_SECONDS)
            except threading.BrokenBarrierError:
                self._left -= 1
                self._barrier.reset()
        return self._wait


def _read(store: ObjectStore, key: str) -> bytes | None:
    with suppress(ObjectMissing):
        return store.read(key)
    return None


@contextmanager
def _delete_afterwards(store: ObjectStore, *keys: str) -> Iterator[None]:
    try:
        yield
    finally:
        for key in keys:
            with suppress(StorageError):
                store.delete(key)


def _second_succeeded(store: ObjectStore) -> str:
    how = "" if store.local_path("probe") else "ignores If-None-Match: "
    return f"{how}the second create of one key succeeded"


def _unsound(store: ObjectStore, problem: str) -> StoreUnsound:
    return StoreUnsound(f"{store.url}: {problem}; no run may be kept there, choose another store")
