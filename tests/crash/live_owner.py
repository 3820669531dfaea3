"""An owner of a run that lives elsewhere: somebody shows its heartbeats."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cairn.storage.logs.step_log import Heartbeat, write_heartbeat
from tests.fabricated_run import FabricatedRun

QUICK_BEATS = ("--set", "lease.seconds=60", "--set", "lease.heartbeat_seconds=0.3")
"""A living owner is known by its next beat, and a dead one of this machine too: no lease is waited for."""


@contextmanager
def beating(run: FabricatedRun) -> Iterator[None]:
    """Show life as a trainer elsewhere would."""
    stopped = threading.Event()

    def beat() -> None:
        number = 0
        while not stopped.wait(0.1):
            number += 1
            heartbeat = Heartbeat(attempt=1, beat=number, step=1, train_loss=1.0, tokens=1, gpu_seconds=1.0)
            write_heartbeat(run.log.store, run.log.prefix, heartbeat)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
