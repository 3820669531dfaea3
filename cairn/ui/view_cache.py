"""What was last read from the store, read again at most so often that reading takes a fiftieth of the time."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from uuid import uuid4

from reports.errors import ReportError
from storage.errors import StorageError

LEAST_SECONDS = 1.0
"""Nothing is read again sooner."""
_REST = 50
_MOST_VIEWS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What was read, the error if it cannot be read now, and a version that changes with either.

    The value is None where it could never be read.
    """

    value: Any
    error: StorageError | ReportError | None
    version: str


@dataclass(kw_only=True, slots=True)
class _Entry:
    read: Callable[[], Any] | None = None
    look: Look | None = None
    due: float = 0.0
    lock: Lock = field(default_factory=Lock)


class ViewCache:
    """Views by name, the least recently used dropped; thread-safe.

    While one thread reads a view, the others are answered with what was read before.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = Lock()

    def look(self, name: str, open_view: Callable[[], Callable[[], Any]]) -> Look:
        """Return a view; `open_view` returns what reads it, and is called again after an error."""
        with self._lock:
            entry = self._entries.setdefault(name, _Entry())
            self._entries.move_to_end(name)
            while len(self._entries) > _MOST_VIEWS:
                self._entries.popitem(last=False)
        if entry.lock.acquire(blocking=entry.look is None):
            try:
                if entry.look is None or self._clock() >= entry.due:
                    self._read(entry, open_view)
            finally:
                entry.lock.release()
        assert entry.look is not None
        return entry.look

    def _read(self, entry: _Entry, open_view: Callable[[], Callable[[], Any]]) -> None:
        began, before = self._clock(), entry.look
        value, error = before.value if before else None, None
        try:
            entry.read = entry.read or open_view()
            value = entry.read()
        except (StorageError, ReportError) as problem:
            entry.read, error = None, problem
        ended = self._clock()
        entry.due = ended + max(LEAST_SECONDS, _REST * (ended - began))
        if before is None or before.value != value or str(before.error) != str(error):
            entry.look = Look(value=value, error=error, version=uuid4().hex)
