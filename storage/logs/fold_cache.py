"""The cached fold of a log: a small head that opens it, and parts with old items, read only when they are asked for.

The cache may be stale, damaged or missing: nothing depends on it. Parts are named by their SHA-256 and written once.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache, partial
from itertools import chain, takewhile
from types import GenericAlias
from typing import Annotated, Any, Generic, Self, TypeVar, get_args, overload

import msgspec

from cairn.storage.errors import IntegrityError, ObjectMissing, StorageError
from cairn.storage.logs.log_entry import Entry, EntryLog, ReadEntry
from cairn.storage.stores.codec import MAX_DOCUMENT_BYTES, decode, encode, sha256

T = TypeVar("T")
PART_ITEMS = 256
"""Items in a part; fixed, because the number of a part says which items it holds."""
_UNPACKED_PARTS = 16


class Part(Generic[T]):
    """`PART_ITEMS` items, compressed; `sha256` names the object that holds them, and is empty until they are written.

    Items as objects take ten times as much memory, and a run may have a thousand parts.
    """

    def __init__(self, items: tuple[T, ...] | None = None, *, sha256: str = "", item_type: Any = None) -> None:
        self.sha256, self.item_type = sha256, item_type
        self.load: Callable[[], tuple[T, ...]] = tuple
        self.packed = b""
        self._items = None if items is None else self._pack(items)

    @property
    def items(self) -> tuple[T, ...]:
        """The items, read by `load` the first time."""
        if self._items is None and not self.packed:
            self._items = self._pack(self.load())
        return _unpack(self) if self._items is None else self._items

    def _pack(self, items: tuple[T, ...]) -> tuple[T, ...] | None:
        kinds = {self.item_type} if self.item_type else set(map(type, items))
        if len(kinds) != 1 or not is_dataclass(kind := kinds.pop()):
            return items
        with suppress(ValueError, OverflowError):  # a foreign log may hold what JSON is read from, and not written to
            self.item_type, self.packed = kind, zlib.compress(msgspec.json.encode(items), 1)
            return None
        return items


@lru_cache(maxsize=_UNPACKED_PARTS)
def _unpack(part: Part[Any]) -> tuple[Any, ...]:
    items: tuple[Any, ...] = msgspec.json.decode(zlib.decompress(part.packed), type=items_type(part.item_type))
    return items


class History(Sequence[T]):
    """An immutable sequence: parts, then the recent items, which are always in memory."""

    def __init__(self, items: Iterable[T] = (), *, parts: tuple[Part[T], ...] = ()) -> None:
        recent = tuple(items)
        full = max(len(recent) // PART_ITEMS - 1, 0) * PART_ITEMS  # at least one part's items stay recent
        sealed = (Part(recent[start : start + PART_ITEMS]) for start in range(0, full, PART_ITEMS))
        self.parts, self.recent = (*parts, *sealed) if full else parts, recent[full:]

    def append(self, item: T) -> Self:
        """Return the sequence with one more item."""
        return type(self)((*self.recent, item), parts=self.parts)

    def replace_last(self, item: T) -> Self:
        """Return the sequence with another last item."""
        return self.cut(len(self) - 1).append(item)

    def cut(self, length: int) -> Self:
        """Return the first `length` items."""
        whole = len(self.parts) * PART_ITEMS
        if length >= whole:
            return type(self)(self.recent[: length - whole], parts=self.parts)
        number, rest = divmod(length, PART_ITEMS)
        return type(self)(self.parts[number].items[:rest], parts=self.parts[:number])

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        part, place = divmod(range(len(self))[index], PART_ITEMS)
        if part < len(self.parts):
            return self.parts[part].items[place]
        return self.recent[(part - len(self.parts)) * PART_ITEMS + place]

    def __len__(self) -> int:
        return len(self.parts) * PART_ITEMS + len(self.recent)

    def __iter__(self) -> Iterator[T]:
        return chain(chain.from_iterable(part.items for part in self.parts), self.recent)

    def __reversed__(self) -> Iterator[T]:
        older = chain.from_iterable(reversed(part.items) for part in reversed(self.parts))
        return chain(reversed(self.recent), older)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History | tuple):
            return NotImplemented
        return len(self) == len(other) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items, the newest {self.recent[-3:]!r})"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    parts: tuple[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")], ...]
    recent: Any


def encode_history(value: object) -> object:
    """Return a history as JSON types, for msgspec; its parts must be written."""
    if isinstance(value, History):
        return {"parts": [part.sha256 for part in value.parts], "recent": value.recent}
    raise NotImplementedError(f"{type(value)} cannot be stored")


def decode_history(kind: Any, value: Any) -> object:
    """Return the history that JSON types stand for, for msgspec; its parts are not read and have no `load` yet."""
    item_type = get_args(kind)[0]
    stored = msgspec.convert(value, _Stored)
    parts = tuple(Part[Any](sha256=name, item_type=item_type) for name in stored.parts)
    return History(msgspec.convert(stored.recent, items_type(item_type)), parts=parts)


def items_type(item_type: Any) -> type[tuple[Any, ...]]:
    """Return the type of several items, for msgspec."""
    return GenericAlias(tuple, (item_type, ...))  # type: ignore[return-value]


FOLD_VERSION = 10
S = TypeVar("S")
Fold = Callable[[Iterable[Entry], S | None], S]
"""Returns the state after these entries, from a state on or from none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Label:
    version: int
    seq: int
    entry_sha256: str
    state_sha256: str


class LogFold(Generic[S]):
    """A log with its folded state, which only moves forward and is first read by `refresh`."""

    def __init__(self, log: EntryLog, folder: str, fold: Fold[S], *, cache_every: int) -> None:
        """Cache the fold after so many entries in `folder`: as `fold.json`, and its parts in `fold/`."""
        self._log, self._folder, self._fold = log, folder, fold
        self.head: ReadEntry | None = None
        """The newest entry read so far, which the state ends with."""
        self._is_whole = False
        self._cache_every, self._cached_seq, self.state = cache_every, -1, fold((), None)
        self.fold_key = f"{folder}/fold.json"
        """The key of the cached fold's head: a label in one line, then the state."""

    @property
    def seq(self) -> int:
        """The number of the newest entry read so far, -1 before the first."""
        return -1 if self.head is None else self.head.entry.seq

    def refresh(self) -> S:
        """Read the entries appended since and return the state; the first time, start from the cached fold."""
        if self.head is None:  # whatever a sketch of the state said, the log says it again
            self.state = self._fold((), None)
            if (folded := self.read_fold()) is not None and self._is_sound(*folded):
                (self.head, self.state), self._cached_seq = folded, folded[0].entry.seq
        for read in self._log.read_after(self.head):
            self._accept(read)
        return self.state

    def refresh_whole(self) -> S:
        """Refresh, the first time with a request for the newest name: raises `IntegrityError` for a hole before it.

        For a first append, and for what is decided by an entry's absence: a reader takes a hole for the end.
        """
        newest = -1 if self._is_whole else self._log.newest_seq()  # first: then all before it is there
        state = self.refresh()
        self._log.check_reaches(self.seq, newest)
        self._is_whole = True
        return state

    def cache(self) -> None:
        """Cache the fold if some entries were read since it was cached; a store that refuses it loses nothing."""
        if self.head is not None and self.seq - self._cached_seq >= self._cache_every:
            with suppress(StorageError):
                self._cached_seq = self.seq
                self.write_fold(self.head, self.state)

    def _is_sound(self, head: ReadEntry, state: S) -> bool:
        """Whether a cached fold is one that this program would have made."""
        return True

    def _accept(self, read: ReadEntry) -> None:
        self.head, self.state = read, self._fold([read.entry], self.state)

    def write_fold(self, head: ReadEntry, state: S) -> None:
        """Write the parts that are new, then the head; a head that no reader would take is not written."""
        for _, _, part in _parts(state):
            if not part.sha256:
                self._write_part(part)
        data = encode(state, hook=encode_history)
        if len(data) <= MAX_DOCUMENT_BYTES:
            seq, digest = head.entry.seq, sha256(data)
            label = _Label(version=FOLD_VERSION, seq=seq, entry_sha256=head.sha256, state_sha256=digest)
            self._log.store.write(self.fold_key, encode(label).replace(b"\n", b"") + b"\n" + data)

    def read_fold(self) -> tuple[ReadEntry, S] | None:
        """Return the cached state and its entry, None if they disagree; `IntegrityError` if entries were deleted."""
        try:
            line, _, state_bytes = self._log.store.read(self.fold_key).partition(b"\n")
            label = decode(line, _Label, where=self.fold_key)
            if label.version != FOLD_VERSION or sha256(state_bytes) != label.state_sha256:
                return None
            state = decode(state_bytes, type(self.state), where=self.fold_key, hook=decode_history)
        except (ObjectMissing, IntegrityError):
            return None
        head = self._log.read(label.seq)
        if head is None:
            self._log.check_reaches(label.seq - 1, self._log.newest_seq())
            problem = f"ends before seq {label.seq}, which {self.fold_key} was folded from: entries were deleted"
            advice = f"restore them, or delete {self.fold_key} to accept the loss"
            raise IntegrityError(f"{self._log.prefix}: {problem}; {advice}")
        if head.sha256 != label.entry_sha256:
            return None
        refold = cache(lambda: self._refold(label.seq))
        for name, number, part in _parts(state):
            part.load = partial(self._load, part, name, number, refold)
        return head, state

    def _load(self, part: Part[Any], name: str, number: int, refold: Callable[[], S]) -> tuple[Any, ...]:
        """Return the items of a part, from the log's entries if its object is missing or damaged."""
        key = f"{self._folder}/fold/{part.sha256}.json"
        with suppress(ObjectMissing, IntegrityError):
            data = self._log.store.read(key)
            if sha256(data) == part.sha256:
                return decode(data, items_type(part.item_type), where=key)
        first = number * PART_ITEMS
        return tuple(getattr(refold(), name)[first : first + PART_ITEMS])

    def _write_part(self, part: Part[Any]) -> None:
        data = msgspec.json.encode(part.items, order="sorted")
        self._log.store.write(f"{self._folder}/fold/{sha256(data)}.json", data)
        part.sha256 = sha256(data)

    def _refold(self, last: int) -> S:
        """Return the state of the whole log up to `last` with every item in memory, and write its parts again.

        Raises `IntegrityError` naming the first entry that is missing.
        """
        state, seq = self._fold((), None), -1
        for read in takewhile(lambda read: read.entry.seq <= last, self._log.read_after(None)):
            state, seq = self._fold([read.entry], state), read.entry.seq
        self._log.check_reaches(seq, last)
        with suppress(StorageError):
            for _, _, part in _parts(state):
                self._write_part(part)
        return state


def _parts(state: Any) -> Iterator[tuple[str, int, Part[Any]]]:
    """Yield the parts of the state's histories: the field, the part's number, the part."""
    for item in fields(state):
        history = getattr(state, item.name)
        if isinstance(history, History):
            yield from ((item.name, number, part) for number, part in enumerate(history.parts))
