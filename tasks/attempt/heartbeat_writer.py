"""The thread that rewrites an attempt's heartbeat object; a store that does not answer costs one heartbeat."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from storage.errors import StorageError
from storage.logs.heartbeat import Heartbeat, write_heartbeat
from storage.stores.object_store import ObjectStore
from tasks.machine.background_thread import running_beside


def writing_heartbeats(
    store: ObjectStore, run_prefix: str, progress: Callable[[int], Heartbeat], *, every_seconds: float
) -> AbstractContextManager[None]:
    """Write `progress(number)` at once, then every `every_seconds` while the block runs, and once more at its end."""

    def write(stop: threading.Event) -> None:
        number = 0
        while True:
            with suppress(StorageError):
                write_heartbeat(store, run_prefix, progress(number))
            if stop.is_set():
                return
            stop.wait(every_seconds)
            number += 1

    return running_beside(write, name="heartbeat")
