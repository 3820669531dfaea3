"""What a person sees while text becomes a data snapshot: a bar with bytes and time left on a terminal, sparse lines
elsewhere.

Owns the looks. Refuses to influence anything: a closed terminal costs the words, never the snapshot.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tasks.build_progress import BuildProgress, BuildStage

_PLAIN_EVERY_SECONDS = 10.0
_BAR_CELLS = 24
_MEGABYTE = 1e6


class TextProgress:
    """Listens to a snapshot being made; what is quick is passed over in silence where there is no terminal."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, console: Console | None = None) -> None:
        """Show on stderr, or on the given console."""
        self._clock = clock
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._live: Live | None = None
        self._stage: BuildStage | None = None
        self._begun: tuple[float, int] = (0.0, 0)
        self._spoken_at = clock()

    @contextmanager
    def shown(self) -> Iterator["TextProgress"]:
        """Keep a live line while the block runs, where the console is a terminal; it is gone afterwards."""
        if not self._console.is_terminal:
            yield self
            return
        with Live(console=self._console, refresh_per_second=8, transient=True) as self._live:
            yield self
        self._live = None

    def __call__(self, progress: BuildProgress) -> None:
        """Show how far it has come."""
        now = self._clock()
        if progress.stage is not self._stage:
            self._stage, self._begun = progress.stage, (now, progress.bytes_done)
        if self._live is not None:
            self._live.update(Text(self._line(progress, now, bar=True)))
        elif now - self._spoken_at >= _PLAIN_EVERY_SECONDS:
            self._spoken_at = now
            with suppress(OSError):
                self._console.print(Text(self._line(progress, now, bar=False)), soft_wrap=True)

    def _line(self, progress: BuildProgress, now: float, *, bar: bool) -> str:
        share = progress.bytes_done / progress.bytes_total if progress.bytes_total else 0.0
        filled = int(share * _BAR_CELLS)
        drawn = f" {'━' * filled}{'─' * (_BAR_CELLS - filled)}" if bar else ""
        begun_at, begun_bytes = self._begun
        seconds, done = now - begun_at, progress.bytes_done - begun_bytes
        left = (progress.bytes_total - progress.bytes_done) * seconds / done if done else None
        eta = "–" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}"
        documents = f"{progress.documents:,} documents · " if progress.documents else ""
        return (
            f"{progress.stage.value} text{drawn} {100 * share:.0f} % · {progress.bytes_done / _MEGABYTE:,.1f} of "
            f"{progress.bytes_total / _MEGABYTE:,.1f} MB · {documents}"
            f"{done / seconds / _MEGABYTE if seconds > 0 else 0.0:,.1f} MB/s · ETA {eta}"
        )
