"""Asking again: how often, how long, with which pauses between.

Owns exponential back-off with jitter (Brooker, "Exponential Backoff And Jitter", 2015; half of each pause is
random). Refuses to know what is asked; what the store did not answer cleanly is asked again, never `StoreRefused`, and
whoever asks knows that doing it twice is as good as once. No retry library: those log what they call with, which here
would be the data.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import AppendUnknown, StorageError, StoreRefused, StoreUnavailable

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """At most `tries` times, and no further try begins once `total_seconds` would have passed."""

    tries: int = 6
    total_seconds: float = 10.0
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 3.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        """Refuse a patience that would never ask."""
        if self.tries < 1:
            raise StorageError(f"tries {self.tries}: must be at least 1")

    def ask(
        self, operation: Callable[[], T], *, told: Callable[[StorageError, float], None] = lambda error, seconds: None
    ) -> T:
        """Return what the operation returns; raise its last error when patience has run out.

        Asked again is after `StoreUnavailable`, and after `AppendUnknown`, which an append that recognises itself may
        be; `told` hears each error that is not the last, and the seconds since the first try.
        """
        began = self.clock()
        for number in range(self.tries):
            try:
                return operation()
            except StoreRefused:
                raise
            except (StoreUnavailable, AppendUnknown) as error:
                pause_seconds = self._pause_seconds(number)
                waited_seconds = self.clock() - began
                if waited_seconds + pause_seconds >= self.total_seconds or number == self.tries - 1:
                    raise
                told(error, waited_seconds)
            self.sleep(pause_seconds)
        raise AssertionError("the last try returns or raises")

    def _pause_seconds(self, number: int) -> float:
        longest = min(self.longest_pause_seconds, self.first_pause_seconds * 2.0 ** min(number, 30))
        return longest * (1 + self.random()) / 2
