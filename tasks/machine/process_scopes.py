"""Daemon threads beside this process's own work, and a block without a search for garbage."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread


@contextmanager
def running_beside(body: Callable[[Event], None], *, name: str, join_seconds: float | None = None) -> Iterator[None]:
    """Run `body(stop)` in a thread while the block runs, then set `stop` and join it for up to `join_seconds`."""
    stop = Event()
    thread = Thread(target=body, args=(stop,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(join_seconds)


@contextmanager
def repeating_beside(
    work: Callable[[bool], None],
    report: Callable[[Exception], None],
    *,
    name: str,
    every_seconds: float,
    longest_seconds: float,
    join_seconds: float,
) -> Iterator[None]:
    """Call `work(is_last)` in a thread again and again while the block runs, and once more at its end.

    `report` gets the first of failures in a row; each of them doubles the pause, which stays below `longest_seconds`.
    """

    def body(stop: Event) -> None:
        failures = 0
        while True:
            is_last = stop.is_set()
            try:
                work(is_last)
                failures = 0
            except Exception as error:  # whatever a receiver does, the block goes on
                failures += 1
                if failures == 1:
                    with suppress(Exception):
                        report(error)
            if is_last:
                return
            stop.wait(min(every_seconds * 2 ** min(failures, 20), max(every_seconds, longest_seconds)))

    with running_beside(body, name=name, join_seconds=join_seconds):
        yield


class BackgroundWork:
    """Work of the same kind in a daemon thread, never two at once; `report` gets the error of one that failed.

    Work that is asked for while it runs begins once more: what was there to do may have come after its look.
    """

    def __init__(self, work: Callable[[], object], report: Callable[[Exception], None], *, name: str) -> None:
        self._work, self._report, self._name = work, report, name
        self._lock, self._is_asked, self._idle = Lock(), False, Event()
        self._idle.set()
        self._error: Exception | None = None

    def start(self) -> None:
        """Start it, or have the running one begin once more."""
        with self._lock:
            self._is_asked = True
            if self._idle.is_set():
                self._idle.clear()
                Thread(target=self._run, name=self._name, daemon=True).start()

    def finish(self) -> Exception | None:
        """Do the work once more, after the running one, and wait for that; return the error it failed with."""
        self.start()
        self._idle.wait()
        return self._error

    def _run(self) -> None:
        while self._take():
            self._error = None
            try:
                self._work()
            except Exception as error:
                self._error = error
                self._report(error)

    def _take(self) -> bool:
        with self._lock:
            asked, self._is_asked = self._is_asked, False
            if not asked:
                self._idle.set()
            return asked


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Collect no garbage while the block makes many objects that stay, and never search them: a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
