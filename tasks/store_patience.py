"""Asking a store again that is away, for as long as the run's patience lasts.

Owns the waiting, with jitter, so that runs that lost one store do not return to it in step. Only for operations that
may be done twice, such as appends that recognise what they appended. Refuses to know what is asked.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import AppendUnknown, StoreRefused, StoreUnavailable

T = TypeVar("T")
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePatience:
    """How long a store may be away; clock, sleep and jitter come from outside."""

    seconds: float
    say: Callable[[str], None]
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random

    def ask(self, operation: Callable[[], T]) -> T:
        """Return what `operation` returns, asking again while the store is away; raises its last error when that lasts.

        A refusal (`StoreRefused`) is not asked again.
        """
        started, wait_seconds = self.monotonic(), _FIRST_WAIT_SECONDS
        while True:
            try:
                return operation()
            except StoreRefused:
                raise
            except (StoreUnavailable, AppendUnknown) as error:
                if self.monotonic() - started + wait_seconds > self.seconds:
                    raise
                self.say(f"  the store is away, asking again: {error}")
            self.sleep(wait_seconds * (1 - self.jitter() / 2))
            wait_seconds = min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)
