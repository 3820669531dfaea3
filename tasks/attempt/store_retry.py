"""How long a run waits for a store that is away, before the attempt is over.

Only for operations that may be done twice, such as appends that recognise what they appended.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import StorageError
from storage.stores.retry_policy import RetryPolicy

T = TypeVar("T")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 15.0
_TRIES = 1_000_000
"""The clock ends it, not a count."""


def run_retry_policy(seconds: float) -> RetryPolicy:
    """Return the patience of a run that waits `seconds` for its store."""
    return RetryPolicy(
        tries=_TRIES,
        total_seconds=seconds,
        first_pause_seconds=_FIRST_PAUSE_SECONDS,
        longest_pause_seconds=_LONGEST_PAUSE_SECONDS,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRetry:
    """A run's patience, and where a person is told of it."""

    patience: RetryPolicy
    say: Callable[[str], None]

    def ask(self, operation: Callable[[], T]) -> T:
        """Return what `operation` returns, asking again while the store is away; raises its last error."""
        return self.patience.ask(operation, told=self._told)

    def _told(self, error: StorageError, seconds: float) -> None:
        self.say(f"  the store is away for {seconds:.0f} s, asking again: {error}")
