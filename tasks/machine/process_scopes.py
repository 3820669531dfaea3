"""What this process does while a block runs: a daemon thread beside it, or no search for garbage."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def running_beside(
    body: Callable[[threading.Event], None], *, name: str, join_seconds: float | None = None
) -> Iterator[None]:
    """Run `body(stop)` in a thread while the block runs, then set `stop` and join it for up to `join_seconds`."""
    stop = threading.Event()
    thread = threading.Thread(target=body, args=(stop,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(join_seconds)


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Collect no garbage while the block makes much that stays, and never look through it: a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
