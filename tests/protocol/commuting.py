"""Finds the moments at which a late request may arrive before or after an operation and nobody can tell which.

A process knows of a store only what its operations answer. So an arrival before an operation is an arrival after it,
which is one before the next operation, where both orders give the operation the same answer and leave the same store:
from there on the process asks the same and is answered the same. Both orders are carried out on the store as it was at
that moment; what has no such proof counts as different. Compare partial-order reduction (Godefroid, 1996).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from cairn.storage.stores.object_store import UnfinishedWrite
from tests.protocol.world import WatchedStore, copied
from tests.storage.faulty_store import delete_one_by_one, whole

Request = Callable[[WatchedStore], object]
Content = tuple[dict[str, bytes], tuple[UnfinishedWrite, ...]]
"""What a store holds, unfinished writes as well."""


@dataclass(frozen=True)
class Operation:
    """One operation of a process: what the store held before it, what was asked and what was answered."""

    before: Content
    ask: Request
    answer: object


class RecordingStore:
    """A store that remembers all that one process asks of it, and what it held at each moment."""

    def __init__(self, store: WatchedStore) -> None:
        self._store, self.operations, self.looks = store, list[Operation](), set[int]()

    @property
    def inner(self) -> Any:
        """The store as a judge sees it, who looks between two operations and is no process."""
        self.looks.add(len(self.operations))
        return self._store.inner

    def __getattr__(self, name: str) -> Any:
        """Return the store's attribute; anything callable is an operation."""
        value = getattr(self._store, name)
        return partial(self._operate, name) if callable(value) else value

    delete_all = delete_one_by_one

    def _operate(self, name: str, *args: Any, **named: Any) -> Any:
        before, args = _content(self._store), whole(args)
        answer, result = _answer(self._store, name, args, named)
        self.operations.append(Operation(before, lambda store: _answer(store, name, args, named)[0], answer))
        if isinstance(result, Exception):
            raise result
        return result

    def moments(self, late: Request) -> list[range]:
        """Return the moments at which the request can arrive, those together that nobody can tell apart.

        A moment is the number of operations that came before.
        """
        contents = [*(operation.before for operation in self.operations), _content(self._store)]
        ends = [
            at + 1
            for at, after in enumerate(contents[1:])
            if at + 1 in self.looks or not _commutes(self.operations[at], after, late)
        ]
        return [range(*pair) for pair in pairwise([0, *ends, len(contents)])]


def _commutes(operation: Operation, after: Content, late: Request) -> bool:
    """Whether the request and the operation, in both orders, answer the same and leave the same store."""
    early, behind = _store(operation.before), _store(after)
    try:
        late(early)
        answer = operation.ask(early)
        late(behind)
    except Exception:
        return False
    return answer == operation.answer and _content(early) == _content(behind)


def _answer(store: WatchedStore, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[object, Any]:
    """Return what an operation answers in a form that can be compared, and its result or error."""
    try:
        result = getattr(store, name)(*args, **named)
        if isinstance(result, Iterator):
            result = list(result)
            return result, iter(result)
    except Exception as error:
        return (type(error), str(error)), error
    return (result, *(bytes(arg) for arg in args if isinstance(arg, memoryview))), result


def _store(content: Content) -> WatchedStore:
    return WatchedStore(copied(content[0]), content[1])


def _content(store: WatchedStore) -> Content:
    return dict(store.inner._objects), tuple(store.leftovers)
