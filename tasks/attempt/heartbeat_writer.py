"""The thread that rewrites an attempt's heartbeat object; a store that does not answer costs one heartbeat."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from storage.errors import StorageError
from storage.logs.heartbeat import Heartbeat, write_heartbeat
from storage.stores.object_store import ObjectStore


@contextmanager
def writing_heartbeats(
    store: ObjectStore, run_prefix: str, progress: Callable[[int], Heartbeat], *, every_seconds: float
) -> Iterator[None]:
    """Write `progress(number)` at once, then every `every_seconds` while the block runs, and once more at its end."""
    stop = threading.Event()

    def write() -> None:
        number = 0
        while True:
            with suppress(StorageError):
                write_heartbeat(store, run_prefix, progress(number))
            if stop.is_set():
                return
            stop.wait(every_seconds)
            number += 1

    thread = threading.Thread(target=write, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
