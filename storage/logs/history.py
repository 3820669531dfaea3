"""Long sequences of a folded state: old items lie in parts that never change and are read only when asked for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import GenericAlias
from typing import Annotated, Any, Generic, Self, TypeVar, get_args, get_origin, overload

import msgspec

T = TypeVar("T")
PART_ITEMS = 256
"""Items in a part; fixed, because the number of a part says which items it holds."""


class Part(Generic[T]):
    """`PART_ITEMS` items; `sha256` names the object that holds them, and is empty until they are written."""

    def __init__(self, items: tuple[T, ...] | None = None, *, sha256: str = "", item_type: Any = None) -> None:
        self.sha256, self.item_type = sha256, item_type
        self.load: Callable[[], tuple[T, ...]] = tuple
        self._items = items

    @property
    def items(self) -> tuple[T, ...]:
        """The items, read by `load` the first time."""
        if self._items is None:
            self._items = self.load()
        return self._items

    def __len__(self) -> int:
        return PART_ITEMS


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
        number = range(len(self))[index]
        part, place = divmod(number, PART_ITEMS)
        if part < len(self.parts):
            return self.parts[part].items[place]
        return self.recent[number - len(self.parts) * PART_ITEMS]

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


class Listed(History[T]):
    """A history of small items, all of which a decision needs: it is stored as one list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    parts: tuple[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")], ...]
    recent: Any


def encode_history(value: object) -> object:
    """Return a history as JSON types, for msgspec; its parts must be written."""
    if isinstance(value, Listed):
        return list(value)
    if isinstance(value, History):
        return {"parts": [part.sha256 for part in value.parts], "recent": value.recent}
    raise NotImplementedError(f"{type(value)} cannot be stored")


def decode_history(kind: Any, value: Any) -> object:
    """Return the history that JSON types stand for, for msgspec; its parts are not read and have no `load` yet."""
    item_type = get_args(kind)[0]
    if get_origin(kind) is Listed:
        return Listed(msgspec.convert(value, items_type(item_type)))
    stored = msgspec.convert(value, _Stored)
    parts = tuple(Part[Any](sha256=name, item_type=item_type) for name in stored.parts)
    return History(msgspec.convert(stored.recent, items_type(item_type)), parts=parts)


def items_type(item_type: Any) -> type[tuple[Any, ...]]:
    """Return the type of several items, for msgspec."""
    return GenericAlias(tuple, (item_type, ...))  # type: ignore[return-value]
