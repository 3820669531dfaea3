"""Shows news of watched runs and one line for each run that trains.

On a terminal the lines stay at the bottom; elsewhere a line is printed on stderr at most once a minute.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from flows.watching.run_pulse import RunPulse, pulse_line
from tasks.text.live_lines import LiveLines
from tasks.text.output import say

_PLAIN_EVERY_SECONDS = 60.0


class WatchDisplay:
    """Shows the pulses of runs."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
        say: Callable[[str], None] = say,
    ) -> None:
        """Show live lines if stdout is a terminal, else print them with `say`."""
        # News goes to stdout, so the live lines have to be on the same terminal.
        self._live = LiveLines(console or Console(file=sys.stdout, highlight=False), stays=False)
        self._clock, self._say = clock, say
        self._printed: dict[str, tuple[int, float]] = {}

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Keep the lines at the bottom of a terminal while the block runs."""
        with self._live.show():
            yield

    def show(self, pulses: Sequence[RunPulse]) -> None:
        """Show the progress of the runs that train now."""
        if self._live.are_shown:
            self._live.write([pulse_line(pulse) for pulse in pulses])
            return
        now = self._clock()
        for pulse in pulses:
            step, at = self._printed.get(pulse.run_id, (-1, float("-inf")))
            if pulse.step != step and now - at >= _PLAIN_EVERY_SECONDS:
                self._printed[pulse.run_id] = (pulse.step, now)
                self._say(pulse_line(pulse))
