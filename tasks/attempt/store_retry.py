"""Retries of a run's own idempotent storage operations, for as long as `checkpoint.patience_seconds` says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import StorageError
from storage.stores.retrying_store import RetryPolicy

T = TypeVar("T")


def run_retry_policy(total_seconds: float) -> RetryPolicy:
    """Return the policy of a run that waits `total_seconds` for its store."""
    tries = 1_000_000  # the time limit ends the retries, not the count
    return RetryPolicy(tries=tries, total_seconds=total_seconds, first_pause_seconds=0.5, longest_pause_seconds=15.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRetry:
    """A run's retry policy, and where each retry is printed."""

    policy: RetryPolicy
    say: Callable[[str], None]

    def call(self, operation: Callable[[], T]) -> T:
        """Return the operation's result; raises its last error when the retries run out."""

        def report(error: StorageError, seconds: float) -> None:
            self.say(f"  the store has not answered for {seconds:.0f} s, trying again: {error}")

        return self.policy.call(operation, on_retry=report)
