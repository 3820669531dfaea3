"""Is a person in the orchestrator's UI ending this run? Asked again and again, and at once when a SIGTERM arrives.

Owns the one question to the API, never waited for longer than a moment: a worker turns a cancellation into SIGTERM, a
run without one is told by nobody. A command's own server is not asked: nobody else knows of it. Refuses to stop
anything: it gives the same notice as everybody else.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client

from tasks.attempt.shutdown_signal import ShutdownSignal

CANCELLED = "cancelled in Prefect"
ASK_SECONDS = 3.0


class CancellationWatch:
    """Asks about one flow run in a thread of its own."""

    def __init__(self, flow_run_id: str | None, notice: ShutdownSignal) -> None:
        """Prepare to ask; a run without a flow run is never being cancelled."""
        self._flow_run_id, self._notice = flow_run_id, notice
        self._ask_now, self._answered = threading.Event(), threading.Event()
        self._stop = self._cancelling = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Ask every few seconds while the block runs, and give notice once the answer is yes."""
        if self._flow_run_id is None:
            yield
            return
        threading.Thread(target=self._watch, args=(UUID(self._flow_run_id),), name="cancellation", daemon=True).start()
        try:
            yield
        finally:
            self._stop = True
            self._ask_now.set()

    def is_cancelling(self) -> bool:
        """Return whether it is, asking at once where a notice came; an API that does not answer in time says no."""
        if self._flow_run_id is not None and self._notice.signal and not self._cancelling and not self._stop:
            self._answered.clear()
            self._ask_now.set()
            self._answered.wait(ASK_SECONDS)
        return self._cancelling

    def _watch(self, flow_run_id: UUID) -> None:
        with suppress(Exception), get_client(sync_client=True) as client:  # whatever the API does, training goes on
            while not self._stop and not self._cancelling:
                self._ask_now.clear()
                self._cancelling = _is_being_cancelled(client, flow_run_id)
                self._answered.set()
                if self._cancelling:
                    self._notice.give(CANCELLED, "a person cancelled it in Prefect")
                    return
                self._ask_now.wait(ASK_SECONDS)


def _is_being_cancelled(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    try:
        state = client.read_flow_run(flow_run_id).state
    except Exception:  # whatever keeps the API from answering is no cancellation
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
