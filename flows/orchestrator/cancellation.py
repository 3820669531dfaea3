"""Detects that a person cancels this run: in Prefect by polling, in Slurm by asking once SIGTERM has come.

Prefect sends no signal without a worker, and Slurm sends the same one before a preemption.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

from prefect.client.orchestration import get_client

from tasks.attempt.shutdown_signal import ShutdownSignal
from tasks.attempt.slurm_job import is_cancelled_in_slurm

_POLL_SECONDS = 3.0


class CancellationWatch:
    """Polls the state of one flow run in its own thread."""

    def __init__(self, flow_run_id: str | None, shutdown: ShutdownSignal) -> None:
        """Prepare to poll; `flow_run_id` None polls nothing."""
        self._flow_run_id, self._shutdown = flow_run_id, shutdown
        self._poll_now, self._answered = threading.Event(), threading.Event()
        self._stop = self._cancelling = False
        self._cancelled_in_slurm: bool | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Poll every few seconds while the block runs; a cancellation requests the shutdown."""
        if self._flow_run_id is None:
            yield
            return
        threading.Thread(target=self._poll, args=(UUID(self._flow_run_id),), name="cancellation", daemon=True).start()
        try:
            yield
        finally:
            self._stop = True
            self._poll_now.set()

    def is_cancelling(self) -> bool:
        """Return whether it is cancelled; after a shutdown request it asks first, and a slow answer counts as no."""
        if self._flow_run_id is not None and self._shutdown.signal and not self._cancelling and not self._stop:
            self._answered.clear()
            self._poll_now.set()
            self._answered.wait(_POLL_SECONDS)
        return self._cancelling or self._is_cancelled_in_slurm()

    @property
    def where(self) -> str:
        """Where a person cancelled it."""
        return "Slurm" if self._cancelled_in_slurm else "Prefect"

    def _is_cancelled_in_slurm(self) -> bool:
        if self._cancelled_in_slurm is None and self._shutdown.signal == "SIGTERM":
            self._cancelled_in_slurm = is_cancelled_in_slurm(os.environ)
        return bool(self._cancelled_in_slurm)

    def _poll(self, flow_run_id: UUID) -> None:
        with suppress(Exception), get_client(sync_client=True) as client:  # whatever the API does, training goes on
            while not self._stop and not self._cancelling:
                self._poll_now.clear()
                with suppress(Exception):  # an API that does not answer is no cancellation
                    state = client.read_flow_run(flow_run_id).state
                    self._cancelling = state is not None and (state.is_cancelling() or state.is_cancelled())
                self._answered.set()
                if self._cancelling:
                    self._shutdown.request("cancelled in Prefect", "a person cancelled it in Prefect")
                    return
                self._poll_now.wait(_POLL_SECONDS)
