"""Lines at the bottom of a terminal, rewritten in place. A terminal that fails or is closed never ends the work."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cairn.tasks.text.format import sanitize


def console_of(stream: TextIO) -> Console:
    """Return a stream's console, a terminal only where the stream is one: FORCE_COLOR, as of a notebook, makes none."""
    return Console(file=stream, highlight=False, force_terminal=stream.isatty())


class LiveLines:
    """Lines on a terminal, each cut to its width; without a terminal, nothing."""

    def __init__(self, console: Console | None = None, *, stays: bool) -> None:
        """Write to `console`, stderr's if it is None; the last lines stay on it, or are wiped when the block ends."""
        self.console, self._stays = console or console_of(sys.stderr), stays
        self._live: Live | None = None
        self._lines: Sequence[str] = ()

    @property
    def are_shown(self) -> bool:
        """Whether the lines are on a terminal now."""
        return self._live is not None

    @contextmanager
    def show(self) -> Iterator[None]:
        """Keep the lines on a terminal that can rewrite them while the block runs, if no block around it does."""
        if self.are_shown or not self.console.is_terminal or self.console.is_dumb_terminal:
            yield
            return
        live = Live(console=self.console, refresh_per_second=8, transient=not self._stays, get_renderable=self._render)
        with suppress(OSError):
            live.start()
        self._live = live
        try:
            yield
        finally:
            self._live = None
            with suppress(OSError):
                live.stop()

    def write(self, lines: Sequence[str]) -> None:
        """Replace the lines."""
        self._lines = lines

    def say(self, message: str) -> None:
        """Print a line that stays, also without a terminal; a closed one costs the message, never the work."""
        with suppress(OSError):
            self.console.print(Text(sanitize(message)), soft_wrap=True)

    def _render(self) -> Group:
        return Group(*(Text(line, overflow="ellipsis", no_wrap=True) for line in self._lines))
