"""Is it a person in the orchestrator's UI who ends this run, or the machine? Both arrive as SIGTERM.

Owns the one question to the API, asked beside the orderly end and never waited for longer than a moment.
"""

import threading
from uuid import UUID

from prefect.client.orchestration import get_client

ASK_SECONDS = 3.0


class CancellationInquiry:
    """Asks once, in the background, whether a flow run is being cancelled."""

    def __init__(self, flow_run_id: str | None) -> None:
        """Prepare to ask about the flow run; one without an id is never being cancelled."""
        self._flow_run_id = flow_run_id
        self._thread: threading.Thread | None = None
        self._cancelling = False

    def ask(self) -> None:
        """Begin to ask, once."""
        if self._flow_run_id is None or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._ask, args=(self._flow_run_id,), name="cancellation", daemon=True)
        self._thread.start()

    @property
    def answer(self) -> bool:
        """Whether it is; an API that does not answer in time says no."""
        if self._thread is not None:
            self._thread.join(ASK_SECONDS)
        return self._cancelling

    def _ask(self, flow_run_id: str) -> None:
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(UUID(flow_run_id)).state
        except Exception:  # whatever keeps the API from answering, the run ends in good order all the same
            return
        self._cancelling = state is not None and (state.is_cancelling() or state.is_cancelled())
