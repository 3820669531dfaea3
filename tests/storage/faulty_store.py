"""A store that fails at exactly the k-th operation, in every way a store or a process can fail.

Generic on purpose: whatever the wrapped store offers is counted and can fail, so an operation added
tomorrow is covered without anybody remembering it. Deterministic: no clock, no randomness.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from storage.errors import StoreUnavailable
from storage.object_store import ObjectStore


class Death(BaseException):
    """The process is gone: no `except Exception` may swallow it."""


class Fault(Enum):
    """How the k-th operation fails."""

    ERROR_BEFORE = "the store refuses and nothing happened"
    RESPONSE_LOST = "it happened, but the answer did not arrive"
    DEATH_BEFORE = "the process dies before it"
    DEATH_AFTER = "the process dies right after it"
    TORN_ERROR = "half of the bytes go up, then the connection breaks"
    TORN_DEATH = "half of the bytes go up, then the process dies"
    TORN_VISIBLE = "half of the bytes go up and stay visible, as on a store without atomic writes"


@dataclass
class FaultyStore:
    """Wraps `inner`; operation number `at` (from 0) fails as `fault` says; `at=None` only counts."""

    inner: ObjectStore
    fault: Fault = Fault.ERROR_BEFORE
    at: int | None = None
    operations: list[str] = field(default_factory=list)
    fired: bool = False

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped store's attribute; anything callable is an operation."""
        value = getattr(self.inner, name)
        if not callable(value):
            return value
        return lambda *args: self._operate(name, value, args)

    def _operate(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        number = len(self.operations)
        self.operations.append(name)
        if number != self.at:
            return operation(*args)
        self.fired = True
        return self._fail(name, operation, args)

    def _fail(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        error = StoreUnavailable(f"injected at operation {self.at}: {self.fault.value}")
        match self.fault:
            case Fault.RESPONSE_LOST:
                operation(*args)
            case Fault.DEATH_AFTER:
                operation(*args)
                raise Death
            case Fault.DEATH_BEFORE:
                raise Death
            case Fault.TORN_ERROR | Fault.TORN_DEATH if is_stream(args):
                broken = error if self.fault is Fault.TORN_ERROR else Death()
                operation(args[0], torn(args[1], broken))
            case Fault.TORN_DEATH:
                raise Death
            case Fault.TORN_VISIBLE if len(args) == 2 and name != "create":
                # A log entry is one small PUT, whole or absent; everything else may be left half written.
                data = b"".join(bytes(chunk) for chunk in args[1]) if is_stream(args) else args[1]
                self.inner.write(args[0], data[: len(data) // 2])
        raise error


def is_stream(args: tuple[Any, ...]) -> bool:
    """Whether the operation is given its bytes piece by piece."""
    return len(args) == 2 and not isinstance(args[1], bytes)


def torn(chunks: Iterator[bytes | memoryview], broken: BaseException) -> Iterator[bytes | memoryview]:
    """Yield half of the first chunk, then break."""
    first = memoryview(next(iter(chunks)))
    yield first[: len(first) // 2]
    raise broken
