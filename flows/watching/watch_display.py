"""What a person sees who watches runs: news as they come, and one line for each run that is training.

On a terminal the lines stand at the bottom and are renewed at every look; elsewhere they are printed on stderr when a
run has moved, at most once a minute, so that a log does not fill. Owns the looks; refuses to influence anything.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from flows.watching.run_pulse import RunPulse, pulse_line
from tasks.text.live_line import LiveLines
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
        """Show them on the terminal that stdout is, else let `say` print them."""
        # News are printed on stdout: lines at the bottom of another terminal would be in their way.
        self._live = LiveLines(console or Console(file=sys.stdout, highlight=False), stays=False)
        self._clock, self._say = clock, say
        self._said: dict[str, tuple[int, float]] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the lines at the bottom while the block runs, where there is a terminal."""
        with self._live.shown():
            yield

    def show(self, pulses: Sequence[RunPulse]) -> None:
        """Show how far the runs are that train now."""
        if self._live.are_shown:
            self._live.write([pulse_line(pulse) for pulse in pulses])
            return
        now = self._clock()
        for pulse in pulses:
            step, at = self._said.get(pulse.run_id, (-1, float("-inf")))
            if pulse.step != step and now - at >= _PLAIN_EVERY_SECONDS:
                self._said[pulse.run_id] = (pulse.step, now)
                self._say(pulse_line(pulse))
