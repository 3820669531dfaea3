"""A store that fails at exactly the k-th operation, in every way a store, a network or a process can fail.

Generic on purpose: whatever the wrapped store offers is counted and can fail, so an operation added
tomorrow is covered without anybody remembering it. Deterministic: no clock, no randomness.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from inspect import isgeneratorfunction
from typing import Any

from cairn.storage.errors import NotDurable, StoreUnavailable
from cairn.storage.stores.object_store import ObjectStore


class Death(BaseException):
    """The process is gone: no `except Exception` may swallow it."""


class Fault(Enum):
    """How the k-th operation fails."""

    ERROR_BEFORE = "the store refuses and nothing happened"
    RESPONSE_LOST = "it happened, but the answer did not arrive"
    DEATH_BEFORE = "the process dies before it"
    DEATH_AFTER = "the process dies right after it"
    TORN_ERROR = "half of the bytes move, then the connection breaks"
    TORN_DEATH = "half of the bytes move, then the process dies"
    TORN_VISIBLE = "half of the bytes go up and stay visible, as on a store without atomic writes"
    THROTTLED = "503 SlowDown, for this operation and the next three"
    LOST_THEN_THROTTLED = "it happened, the answer did not arrive, and 503 SlowDown for the next eleven operations"
    OUTAGE = "503 SlowDown from here on"
    NOT_DURABLE = "it happened and is visible, but the fsync of its folder failed, so a power cut may take it back"
    LATE = "the process dies, and its request arrives when others are at work"
    BAD_READ = "one bit of a checkpoint arrives flipped, this once"
    SLOW = "it takes so long that somebody else acts first"


# Eleven: with the lost answer itself exactly what an append tries before it calls its outcome unknown.
FOLLOWING = {Fault.THROTTLED: 3, Fault.LOST_THEN_THROTTLED: 11, Fault.OUTAGE: 1_000_000}
DEADLY = frozenset({Fault.DEATH_BEFORE, Fault.DEATH_AFTER, Fault.TORN_DEATH, Fault.LATE})
_CHANGES = frozenset({"create", "write", "write_stream", "delete", "discard"})
_TORN = frozenset({Fault.TORN_ERROR, Fault.TORN_DEATH})


def delete_one_by_one(store: Any, keys: Iterable[str]) -> None:
    """The `delete_all` of a server: it can fail, and others can come, between any two."""
    for key in keys:
        store.delete(key)


@dataclass
class FaultyStore:
    """Wraps `inner`; operation number `at` (from 0) fails as `fault` says; `at=None` only counts.

    `rival` is what the world does during a SLOW operation, with the wrapped store. After a death every further
    operation of the dead process dies too.
    """

    inner: ObjectStore
    fault: Fault = Fault.ERROR_BEFORE
    at: int | None = None
    operations: list[str] = field(default_factory=list)
    fired: bool = False
    rival: Callable[[ObjectStore], None] | None = None
    keys_asked: list[str] = field(default_factory=list)
    late: Callable[[], object] | None = None
    sent: tuple[str, tuple[Any, ...], Any] | None = None

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped store's attribute; anything callable is an operation."""
        value = getattr(self.inner, name)
        if not callable(value):
            return value
        return lambda *args, **named: self._operate(name, value, args, named)

    delete_all = delete_one_by_one

    def _operate(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        number = len(self.operations)
        self.operations.append(name)
        self.keys_asked.append(next((arg for arg in args if isinstance(arg, str)), ""))
        if self.at is None or number < self.at:
            return operation(*args, **named)
        if number > self.at:
            return self._afterwards(number, operation, args, named)
        self.fired = True
        if self.fault is Fault.SLOW and self.rival is not None:
            self.rival(self.inner)
        if self.fault is Fault.LATE:
            self.sent = name, whole(args), named
            self.late = on_its_way(operation, args, named)
        return perform(self.fault, self.inner, name, operation, args, named)

    def _afterwards(self, number: int, operation: Callable[..., Any], args: tuple[Any, ...], named: Any) -> Any:
        if self.fault in DEADLY:
            raise Death
        if number <= (self.at or 0) + FOLLOWING.get(self.fault, 0):
            raise slow_down()
        return operation(*args, **named)


def die_at_a_deed(act: Callable[[Any], object], store: Any, copy: Any, fault: Fault, deed: int) -> FaultyStore:
    """Act on a copy, then on the store as a process that dies at one of the changes that the act made to the copy."""
    whole = FaultyStore(copy)
    act(whole)
    changes = [number for number, name in enumerate(whole.operations) if name in _CHANGES]
    dying = FaultyStore(store, fault, changes[deed % len(changes)] if changes else None)
    with suppress(Death):
        act(dying)
    return dying


def on_its_way(operation: Callable[..., Any], args: tuple[Any, ...], named: Any = None) -> Callable[[], object]:
    """Return a request that its sender has sent with all its bytes, and that arrives when it is called."""
    args = whole(args)
    return lambda: operation(*args, **(named or {}))


def whole(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an operation with all their bytes."""
    return (args[0], [bytes(chunk) for chunk in args[1]]) if is_stream(args) else args


@dataclass
class ArrivingStore:
    """A store at which a late request arrives before operation number `at` of whoever uses it now."""

    inner: Any
    late: Callable[[], object]
    at: int
    seen: int = 0

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped store's attribute; anything callable is an operation."""
        value = getattr(self.inner, name)
        return partial(self._operate, value) if callable(value) else value

    delete_all = delete_one_by_one

    def _operate(self, operation: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.seen == self.at:
            self.late()
        self.seen += 1
        result = operation(*args, **named)
        return iter(list(result)) if isinstance(result, Iterator) else result  # read now, and not at some later moment


def slow_down() -> StoreUnavailable:
    """What a throttling store answers."""
    return StoreUnavailable("injected: 503 SlowDown")


def perform(
    fault: Fault, store: Any, name: str, operation: Callable[..., Any], args: tuple[Any, ...], named: Any = None
) -> Any:
    """Do one operation as the fault says: its result, an error, or death."""
    named = named or {}
    error = StoreUnavailable(f"injected at {name}: {fault.value}")
    match fault:
        case Fault.SLOW:
            return operation(*args, **named)
        case Fault.BAD_READ:
            result = operation(*args, **named)
            return _flipped(result, args) if _reads_a_checkpoint(name, args[0]) else result
        case Fault.THROTTLED | Fault.OUTAGE:
            raise slow_down()
        case Fault.RESPONSE_LOST | Fault.LOST_THEN_THROTTLED:
            _finish(operation(*args, **named))
        case Fault.NOT_DURABLE:
            _finish(operation(*args, **named))
            raise NotDurable(f"injected at {name}: {fault.value}")
        case Fault.DEATH_AFTER:
            _finish(operation(*args, **named))
            raise Death
        case Fault.DEATH_BEFORE | Fault.LATE:
            raise Death
        case Fault.TORN_ERROR | Fault.TORN_DEATH if is_stream(args):
            operation(args[0], torn(args[1], error if fault is Fault.TORN_ERROR else Death()))
        case Fault.TORN_ERROR | Fault.TORN_DEATH if isgeneratorfunction(operation):
            return torn(operation(*args, **named), error if fault is Fault.TORN_ERROR else Death())
        case Fault.TORN_DEATH:
            raise Death
        case Fault.TORN_VISIBLE if len(args) == 2 and name != "create":
            # A log entry is one small PUT, whole or absent; everything else may be left half written.
            data = b"".join(bytes(chunk) for chunk in args[1]) if is_stream(args) else args[1]
            store.write(args[0], data[: len(data) // 2])
    raise error


def applies(fault: Fault, name: str, store: object, key: str = "") -> bool:
    """Whether this fault differs, at this operation, from a plainer one that is tried as well."""
    operation = getattr(store, name)
    if fault is Fault.LATE:
        return name in _CHANGES
    if fault is Fault.BAD_READ:
        return _reads_a_checkpoint(name, key)
    if fault is Fault.TORN_VISIBLE:
        return name in ("write", "write_stream")
    if fault is Fault.NOT_DURABLE:
        return name == "create"  # a failed write is made again from its first byte
    return fault not in _TORN or name == "write_stream" or isgeneratorfunction(operation)


def is_stream(args: tuple[Any, ...]) -> bool:
    """Whether the operation is given its bytes piece by piece."""
    return len(args) == 2 and not isinstance(args[1], bytes)


def torn(chunks: Iterable[bytes | memoryview], broken: BaseException) -> Iterator[Any]:
    """Yield half of the first chunk, then break."""
    first = memoryview(next(iter(chunks)))
    yield first[: len(first) // 2]
    raise broken


def _reads_a_checkpoint(name: str, key: str) -> bool:
    return name in ("read", "read_chunks", "read_range") and "/checkpoints/" in key


def _flipped(result: Any, args: tuple[Any, ...]) -> Any:
    """Return what was read with the lowest bit of its first byte turned over."""
    if isinstance(result, int):
        args[2][0] ^= 1
        return result
    if isinstance(result, bytes):
        return bytes([result[0] ^ 1]) + result[1:]
    first = next(result)
    return iter([bytes([first[0] ^ 1]) + bytes(first[1:]), *result])


def _finish(result: object) -> None:
    if isinstance(result, Iterator):
        for _ in result:
            pass
