"""The interface of an exporter, and the thread that keeps one up to date.

An exporter cannot stop or slow training: its thread only reads, and an exporter that fails is reported once, started
again from the first step, and retried less and less often.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from reports.exporters.curve_follower import CurveFollower, CurveNews
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from storage.logs.step_log import StepTail

_EVERY_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 300.0
_LAST_WORD_SECONDS = 10.0


class Exporter(Protocol):
    """What a mirror does; each call may raise whatever it likes, and take as long."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def begin(self, state: RunState) -> None:
        """Get ready to be told all of the curve from its first step, whatever was told before."""
        ...

    def write(self, news: CurveNews) -> None:
        """Show what is new."""
        ...

    def end(self, state: RunState) -> None:
        """Show that nobody trains the run any more; nothing else follows."""
        ...


class ExporterThread:
    """One mirror kept up to date while a run trains."""

    def __init__(
        self,
        log: RunLog,
        mirror: Exporter,
        say: Callable[[str], None],
        *,
        every_seconds: float = _EVERY_SECONDS,
        last_word_seconds: float = _LAST_WORD_SECONDS,
    ) -> None:
        """Prepare; nothing is begun yet. The log is only looked at: what the run itself has read of it is enough."""
        self._log, self._mirror, self._say = log, mirror, say
        self._every_seconds, self._last_word_seconds = every_seconds, last_word_seconds
        self._leaving = threading.Event()
        self._follower: CurveFollower | None = None
        self._failures, self._complained = 0, False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the mirror up to date while the block runs; at its end it has a moment for what is left."""
        thread = threading.Thread(target=self._keep, name=f"{self._mirror.name}-mirror", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._leaving.set()
            thread.join(self._last_word_seconds)
            if thread.is_alive() and not self._complained:
                self._say(f"{self._mirror.name} is behind and left so; whoever continues this run makes up for it")

    def _keep(self) -> None:
        while not self._leaving.is_set():
            self._try(self._catch_up)
            self._leaving.wait(min(self._every_seconds * 2**self._failures, _LONGEST_PAUSE_SECONDS))
        self._try(self._leave)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._follower = None  # what was told half is told again from the start
            self._failures += 1
            self._complain(error)
        else:
            self._failures = 0

    def _complain(self, error: Exception) -> None:
        if self._complained:
            return
        self._complained = True
        with suppress(Exception):
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self._say(f"{self._mirror.name} cannot be kept up to date, training goes on: {why}")

    def _catch_up(self) -> None:
        if self._follower is None:
            self._mirror.begin(self._log.state)
            self._follower = CurveFollower(StepTail(self._log.store, self._log.prefix))
        news = CurveNews(more=True)
        while news.more:
            news = self._follower.follow(self._log.state)
            self._mirror.write(news)

    def _leave(self) -> None:
        self._catch_up()
        self._mirror.end(self._log.state)
