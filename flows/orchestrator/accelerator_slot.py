"""A place among the flow runs that use accelerators: Prefect's global concurrency limit, as politeness.

A deployed flow run waits at most an hour and then goes on all the same: what keeps a run safe is its log. Without the
limit, or an answer, it does not wait. A place is a lease, so a killed flow run gives it back within two minutes.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectHTTPStatusError

from cairn.flows.orchestrator.server_home import is_ephemeral_server

ACCELERATORS = "cairn-accelerators"
_ANSWER_SECONDS, _RELEASE_SECONDS = 10.0, 2.0
_LEASE_SECONDS, _POLL_SECONDS, _LOOK_SECONDS = 60.0, 1.0, 0.2


@contextmanager
def accelerator_slot(
    say: Callable[[str], None], *, is_stopping: Callable[[], bool] = lambda: False, most_seconds: float = 3600.0
) -> Iterator[None]:
    """Hold a place while the block runs; a flow run that no deployment has asks for none."""
    if not runtime.flow_run.get_id() or is_ephemeral_server(os.environ):
        yield
        return
    slot = _Slot()
    context = copy_context()  # a thread's own would not know this server
    thread = threading.Thread(target=context.run, args=(slot.hold,), name="accelerator-slot", daemon=True)
    thread.start()
    try:
        slot.wait(say, is_stopping, most_seconds)
        yield
    finally:
        slot.left.set()
        thread.join(_RELEASE_SECONDS)


class _Slot:
    """Asks for the place, renews it and gives it back in a thread of its own, so that no slow API delays the flow."""

    def __init__(self) -> None:
        self.taken, self.ready, self.left = threading.Event(), threading.Event(), threading.Event()

    def hold(self) -> None:
        with suppress(Exception), get_client(sync_client=True) as client:  # an API that fails costs the place
            lease = self._acquire(client) if runtime.deployment.get_id() is not None else None
            self.ready.set()
            while lease is not None and not self.left.wait(_LEASE_SECONDS / 3):
                client.renew_concurrency_lease(lease, _LEASE_SECONDS)
            if lease is not None:
                client.release_concurrency_slots_with_lease(lease)
        self.ready.set()

    def wait(self, say: Callable[[str], None], is_stopping: Callable[[], bool], most_seconds: float) -> None:
        until, is_told = time.monotonic() + _ANSWER_SECONDS, False
        while not self.ready.wait(_LOOK_SECONDS) and time.monotonic() < until and not is_stopping():
            if self.taken.is_set() and not is_told:
                until, is_told = time.monotonic() + most_seconds, True
                say(f"all places of {ACCELERATORS} are taken: waits for one, at most {most_seconds:.0f} s")
        if is_told and not self.ready.is_set() and not is_stopping():
            say(f"no place of {ACCELERATORS} became free: goes on all the same")

    def _acquire(self, client: SyncPrefectClient) -> UUID | None:
        """Return the lease, or None where there is no such limit or it is switched off."""
        while not self.left.is_set():
            try:
                ask = client.increment_concurrency_slots_with_lease
                given = ask([ACCELERATORS], 1, "concurrency", _LEASE_SECONDS).json()
                return UUID(given["lease_id"]) if given["limits"] else None
            except PrefectHTTPStatusError as error:
                if error.response.status_code != 423:  # locked
                    raise
            self.taken.set()
            self.left.wait(_POLL_SECONDS)
        return None
