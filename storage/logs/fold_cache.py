"""The cached fold of a log: a small head that opens it, and parts with old items that few readers need.

The cache may be stale, damaged or missing: nothing depends on it. Parts are named by their SHA-256 and written once.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import takewhile
from typing import Any, Generic, TypeVar

import msgspec

from storage.errors import IntegrityError, ObjectMissing, StorageError
from storage.logs.entry_log import EntryLog, ReadEntry
from storage.logs.history import History, Listed, Part, decode_history, encode_history, items_type
from storage.logs.log_entry import Entry
from storage.stores.document import MAX_DOCUMENT_BYTES, decode, encode, sha256

FOLD_VERSION = 5
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedLog(Generic[S]):
    """The state of a log after the entry `head`."""

    head: ReadEntry
    state: S


@dataclass(frozen=True, kw_only=True, slots=True)
class _Label:
    version: int
    seq: int
    entry_sha256: str
    state_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldCache(Generic[S]):
    """The cached fold of the log `log` in `folder`: `fold.json`, and its parts in `fold/`."""

    log: EntryLog
    folder: str
    state_type: type[S]
    fold: Callable[[Iterable[Entry]], S]

    @property
    def key(self) -> str:
        """The key of the head: a label in one line, then the state."""
        return f"{self.folder}/fold.json"

    def write(self, folded: FoldedLog[S]) -> None:
        """Write the parts that are new, then the head; a head that no reader would take is not written."""
        for _, _, part in _parts(folded.state):
            if not part.sha256:
                part.sha256 = self._write_part(part.items)
        state = encode(folded.state, hook=encode_history)
        if len(state) > MAX_DOCUMENT_BYTES:
            return
        label = _Label(
            version=FOLD_VERSION, seq=folded.head.entry.seq, entry_sha256=folded.head.sha256, state_sha256=sha256(state)
        )
        self.log.store.write(self.key, encode(label).replace(b"\n", b"") + b"\n" + state)

    def read(self) -> FoldedLog[S] | None:
        """Return the cached state, None if it does not match; raises `IntegrityError` if entries were deleted."""
        try:
            line, _, state_bytes = self.log.store.read(self.key).partition(b"\n")
            label = decode(line, _Label, where=self.key)
            if label.version != FOLD_VERSION or sha256(state_bytes) != label.state_sha256:
                return None
            state = decode(state_bytes, self.state_type, where=self.key, hook=decode_history)
        except (ObjectMissing, IntegrityError):
            return None
        head = self.log.read(label.seq)
        if head is None:
            raise IntegrityError(
                f"{self.log.prefix}: ends before seq {label.seq}, which {self.key} was folded from: entries were "
                f"deleted; restore them, or delete {self.key} to accept the loss"
            )
        if head.sha256 != label.entry_sha256:
            return None
        refold = cache(lambda: self._refold(label.seq))
        for name, number, part in _parts(state):
            part.load = partial(self._load, part, name, number, refold)
        return FoldedLog(head=head, state=state)

    def _load(self, part: Part[Any], name: str, number: int, refold: Callable[[], S]) -> tuple[Any, ...]:
        """Return the items of a part, from the log's entries if its object is missing or damaged."""
        key = self._part_key(part.sha256)
        with suppress(ObjectMissing, IntegrityError):
            data = self.log.store.read(key)
            if sha256(data) == part.sha256:
                return decode(data, items_type(part.item_type), where=key)
        first = number * len(part)
        return tuple(getattr(refold(), name)[first : first + len(part)])

    def _write_part(self, items: tuple[Any, ...]) -> str:
        data = msgspec.json.encode(items, order="sorted")
        name = sha256(data)
        self.log.store.write(self._part_key(name), data)
        return name

    def _part_key(self, name: str) -> str:
        return f"{self.folder}/fold/{name}.json"

    def _refold(self, last: int) -> S:
        """Return the state of the whole log up to `last` with every item in memory, and write its parts again."""
        reads = takewhile(lambda read: read.entry.seq <= last, self.log.read_after(None))
        state = self.fold(read.entry for read in reads)
        with suppress(StorageError):
            for _, _, part in _parts(state):
                part.sha256 = self._write_part(part.items)
        return state


def _parts(state: Any) -> Iterator[tuple[str, int, Part[Any]]]:
    """Yield the parts of the state's histories: the field, the part's number, the part."""
    for item in fields(state):
        history = getattr(state, item.name)
        if isinstance(history, History) and not isinstance(history, Listed):
            yield from ((item.name, number, part) for number, part in enumerate(history.parts))
