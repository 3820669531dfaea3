"""The thread that rewrites an attempt's heartbeat every few seconds, best effort.

Owns timing only: what is written comes from a function. A store that does not answer costs a beat, never the run.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from storage.errors import StorageError
from storage.logs.heartbeat import Heartbeat, write_heartbeat
from storage.stores.object_store import ObjectStore


@contextmanager
def beating(
    store: ObjectStore, run_prefix: str, progress: Callable[[int], Heartbeat], *, every_seconds: float
) -> Iterator[None]:
    """Write `progress(beat)` at once, then every `every_seconds` while the block runs, and once more at its end."""
    stop = threading.Event()

    def beat() -> None:
        number = 0
        while True:
            with suppress(StorageError):
                write_heartbeat(store, run_prefix, progress(number))
            if stop.is_set():
                return
            stop.wait(every_seconds)
            number += 1

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
