"""Retries with exponential back-off and jitter (Brooker 2015); libraries would log the call's arguments, here data."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import AppendUnknown, NotDurable, StorageError, StoreRefused, StoreUnavailable

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """At most `tries` tries; no try begins after `total_seconds`."""

    tries: int = 6
    total_seconds: float = 10.0
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 3.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise StorageError(f"tries {self.tries}: must be at least 1")

    def call(self, operation: Callable[[], T], *, on_retry: Callable[[StorageError, float], None] | None = None) -> T:
        """Return the operation's result; the operation must be idempotent. Raises its last error when tries run out.

        Retries StoreUnavailable (but not StoreRefused) and AppendUnknown (but not NotDurable), because appends are
        idempotent by write_id; calls on_retry(error, seconds since the first try) before each retry.
        """
        began = self.clock()
        for number in range(self.tries):
            try:
                return operation()
            except (StoreRefused, NotDurable):
                raise
            except (StoreUnavailable, AppendUnknown) as error:
                doubled_seconds = self.first_pause_seconds * 2.0 ** min(number, 30)
                pause_seconds = min(self.longest_pause_seconds, doubled_seconds) * (1 + self.random()) / 2
                elapsed_seconds = self.clock() - began
                if elapsed_seconds + pause_seconds >= self.total_seconds or number == self.tries - 1:
                    raise
                if on_retry:
                    on_retry(error, elapsed_seconds)
            self.sleep(pause_seconds)
        raise AssertionError("the last try returns or raises")
