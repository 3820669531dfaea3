"""Sweeps of one run beside its training, never two at once; a sweep never delays or fails the run."""

import threading
from typing import Any

from prefect.futures import PrefectFuture

from storage.logs.run_log import RunLog
from storage.stores.object_store import ObjectStore
from tasks.configuration.settings import CheckpointConfig
from tasks.sweep_checkpoints import sweep_checkpoints


class BackgroundSweep:
    """Submits the sweeps of one run as Prefect tasks."""

    def __init__(self, store: ObjectStore, run_id: str, policy: CheckpointConfig, suite_sha256: str) -> None:
        """Prepare without reading; the sweep has its own log reader, so that commits never wait for it."""
        self._log = RunLog(store, run_id)
        self._policy, self._suite_sha256 = policy, suite_sha256
        self._future: PrefectFuture[Any] | None = None
        self._idle = threading.Event()
        self._idle.set()

    def submit(self, moment: str) -> None:
        """Start a sweep unless one is running; what that one misses, the next one deletes."""
        if not self._idle.is_set():
            return
        self._idle.clear()
        self._future = sweep_checkpoints.submit(self._log, self._policy, self._suite_sha256, moment=moment)
        self._future.add_done_callback(lambda _: self._idle.set())

    def finish(self) -> None:
        """Sweep once more after the running sweep, when no attempt is open and no evaluation is outstanding."""
        self.wait()
        self.submit("at the end")
        self.wait()

    def wait(self) -> None:
        """Wait for the running sweep, if there is one; never raises."""
        if self._future is not None:
            self._future.wait()
