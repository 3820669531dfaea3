"""Retries with exponential back-off and jitter (Brooker 2015), and a store whose idempotent operations are retried.

Retry libraries log the call's arguments, which are data here. `create` is not retried, because only the log can tell a
lost race from a second try; `write_stream` is not retried, because its chunks are consumed.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from cairn.storage.errors import AppendUnknown, NotDurable, StorageError, StoreRefused, StoreUnavailable
from cairn.storage.stores.object_store import ObjectStore

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """At most `tries` tries; none begins after `total_seconds`. `on_retry` gets the error and the seconds so far."""

    tries: int = 6
    total_seconds: float = 10.0
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 3.0
    on_retry: Callable[[StorageError, float], None] = lambda error, seconds: None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise StorageError(f"tries {self.tries}: must be at least 1")

    def call(self, operation: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Return the operation's result; the operation must be idempotent. Raises its last error when tries run out.

        Retries StoreUnavailable (but not StoreRefused) and AppendUnknown (but not NotDurable), because appends are
        idempotent by write_id.
        """
        began = self.clock()
        for number in range(self.tries):
            try:
                return operation(*arguments, **named)
            except (StoreRefused, NotDurable):
                raise
            except (StoreUnavailable, AppendUnknown) as error:
                doubled_seconds = self.first_pause_seconds * 2.0 ** min(number, 30)
                pause_seconds = min(self.longest_pause_seconds, doubled_seconds) * (1 + self.random()) / 2
                elapsed_seconds = self.clock() - began
                if elapsed_seconds + pause_seconds >= self.total_seconds or number == self.tries - 1:
                    raise
                self.on_retry(error, elapsed_seconds)
            self.sleep(pause_seconds)
        raise AssertionError("the last try returns or raises")


def run_retry_policy(total_seconds: float, say: Callable[[str], None] = lambda message: None) -> RetryPolicy:
    """Return the policy of a run that waits `total_seconds` for its store and prints each retry with `say`."""
    return RetryPolicy(
        tries=1_000_000,  # the time limit ends the retries, not the count
        total_seconds=total_seconds,
        first_pause_seconds=0.5,
        longest_pause_seconds=15.0,
        on_retry=lambda error, seconds: say(f"  the store has not answered for {seconds:.0f} s, trying again: {error}"),
    )


_DEFAULT = RetryPolicy()


def _retried(method: Callable[Concatenate[ObjectStore, P], T]) -> "Callable[Concatenate[RetryingStore, P], T]":
    """Return a method that calls this one of the inner store, with retries."""

    def call(self: "RetryingStore", /, *arguments: P.args, **named: P.kwargs) -> T:
        inner: Callable[P, T] = getattr(self.inner, method.__name__)
        return self.retry_policy.call(inner, *arguments, **named)

    return call


class RetryingStore(ObjectStore):
    """An `ObjectStore` over another one that may be unavailable for some seconds."""

    def __init__(self, inner: ObjectStore, *, retry_policy: RetryPolicy = _DEFAULT) -> None:
        self.inner, self.retry_policy = inner, retry_policy

    read, read_range, write = _retried(ObjectStore.read), _retried(ObjectStore.read_range), _retried(ObjectStore.write)
    keys, folders, first = _retried(ObjectStore.keys), _retried(ObjectStore.folders), _retried(ObjectStore.first)
    size, sizes = _retried(ObjectStore.size), _retried(ObjectStore.sizes)
    age_seconds = _retried(ObjectStore.age_seconds)
    delete, delete_all = _retried(ObjectStore.delete), _retried(ObjectStore.delete_all)
    unfinished, discard = _retried(ObjectStore.unfinished), _retried(ObjectStore.discard)

    @property
    def url(self) -> str:
        return self.inner.url

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes in chunks; only the first chunk is retried."""

        def begin() -> tuple[list[bytes], Iterator[bytes]]:
            chunks = iter(self.inner.read_chunks(key))
            return [chunk for chunk in (next(chunks, None),) if chunk is not None], chunks

        first, rest = self.retry_policy.call(begin)
        yield from chain(first, rest)

    def create(self, key: str, data: bytes) -> bool:
        return self.inner.create(key, data)

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        return self.inner.write_stream(key, chunks)

    def local_path(self, key: str) -> Path | None:
        return self.inner.local_path(key)
