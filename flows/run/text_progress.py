"""What a person sees while text becomes a data snapshot: a bar with bytes and time left on a terminal, sparse lines
elsewhere.

Owns the looks. Refuses to influence anything: a closed terminal costs the words, never the snapshot.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.text import Text

from tasks.data.build_progress import BuildProgress, BuildStage
from tasks.text.live_line import LiveLines
from tasks.text.time_left import bar, clock_time

_PLAIN_EVERY_SECONDS = 10.0
_BAR_CELLS = 24
_MEGABYTE = 1e6


class TextProgress:
    """Listens to a snapshot being made; what is quick is passed over in silence where there is no terminal."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, console: Console | None = None) -> None:
        """Show on stderr, or on the given console."""
        self._clock = clock
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._live = LiveLines(self._console, stays=False)
        self._stage: BuildStage | None = None
        self._begun: tuple[float, int] = (0.0, 0)
        self._spoken_at = clock()

    @contextmanager
    def shown(self) -> Iterator["TextProgress"]:
        """Keep a live line while the block runs, where the console is a terminal; it is gone afterwards."""
        with self._live.shown():
            yield self

    def __call__(self, progress: BuildProgress) -> None:
        """Show how far it has come."""
        now = self._clock()
        if progress.stage is not self._stage:
            self._stage, self._begun = progress.stage, (now, progress.bytes_done)
        if self._live.are_shown:
            self._live.write([self._line(progress, now, drawn=True)])
        elif now - self._spoken_at >= _PLAIN_EVERY_SECONDS:
            self._spoken_at = now
            with suppress(OSError):
                self._console.print(Text(self._line(progress, now, drawn=False)), soft_wrap=True)

    def _line(self, progress: BuildProgress, now: float, *, drawn: bool) -> str:
        share = progress.bytes_done / progress.bytes_total if progress.bytes_total else 0.0
        cells = f" {bar(share, _BAR_CELLS)}" if drawn else ""
        begun_at, begun_bytes = self._begun
        seconds, done = now - begun_at, progress.bytes_done - begun_bytes
        left = (progress.bytes_total - progress.bytes_done) * seconds / done if done else None
        documents = f"{progress.documents:,} documents · " if progress.documents else ""
        return (
            f"{progress.stage.value} text{cells} {100 * share:.0f} % · {progress.bytes_done / _MEGABYTE:,.1f} of "
            f"{progress.bytes_total / _MEGABYTE:,.1f} MB · {documents}"
            f"{done / seconds / _MEGABYTE if seconds > 0 else 0.0:,.1f} MB/s · ETA {clock_time(left)}"
        )
