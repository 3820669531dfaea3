"""Sweeps of a run beside its training: one at a time, waited for only at the end.

Owns when a sweep is submitted. Refuses to know what a sweep does, and to let one delay or fail the run.
"""

import threading
from typing import Any

from prefect.futures import PrefectFuture

from storage.logs.run_log import RunLog
from storage.stores.object_store import ObjectStore
from tasks.configuration.settings import CheckpointConfig
from tasks.sweep_checkpoints import sweep_checkpoints


class BackgroundSweep:
    """Submits sweeps of one run, never two at once."""

    def __init__(self, store: ObjectStore, run_id: str, policy: CheckpointConfig, suite_sha256: str) -> None:
        """Prepare; nothing is read yet. The sweep reads a log of its own: commits never wait for it."""
        self._log = RunLog(store, run_id)
        self._policy, self._suite_sha256 = policy, suite_sha256
        self._future: PrefectFuture[Any] | None = None
        self._idle = threading.Event()
        self._idle.set()

    def submit(self, moment: str) -> None:
        """Begin a sweep, unless one is at work: what it misses, the next one finds."""
        if not self._idle.is_set():
            return
        self._idle.clear()
        self._future = sweep_checkpoints.submit(self._log, self._policy, self._suite_sha256, moment=moment)
        self._future.add_done_callback(lambda _: self._idle.set())

    def finish(self) -> None:
        """Wait for the sweep at work, then sweep once more: no attempt is open, no evaluation outstanding."""
        self.wait()
        self.submit("at the end")
        self.wait()

    def wait(self) -> None:
        """Wait for the sweep at work, if there is one; it never raises."""
        if self._future is not None:
            self._future.wait()
