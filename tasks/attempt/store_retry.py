"""Retries of a run's own storage operations, for as long as `checkpoint.patience_seconds` says.

Only for idempotent operations, such as appends that recognise their own entry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import StorageError
from storage.stores.retry_policy import RetryPolicy

T = TypeVar("T")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 15.0
_TRIES = 1_000_000  # the time limit ends the retries, not the count


def run_retry_policy(total_seconds: float) -> RetryPolicy:
    """Return the policy of a run that waits `total_seconds` for its store."""
    return RetryPolicy(
        tries=_TRIES,
        total_seconds=total_seconds,
        first_pause_seconds=_FIRST_PAUSE_SECONDS,
        longest_pause_seconds=_LONGEST_PAUSE_SECONDS,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRetry:
    """A run's retry policy, and where each retry is printed."""

    policy: RetryPolicy
    say: Callable[[str], None]

    def call(self, operation: Callable[[], T]) -> T:
        """Return the operation's result; raises its last error when the retries run out."""
        return self.policy.call(operation, on_retry=self._report)

    def _report(self, error: StorageError, elapsed_seconds: float) -> None:
        self.say(f"  the store has not answered for {elapsed_seconds:.0f} s, trying again: {error}")
