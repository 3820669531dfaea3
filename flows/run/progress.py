"""What a person sees while a run trains: one live line with a bar on a terminal, sparse plain lines elsewhere.

Owns the looks. Called from the trainer's listening thread; refuses to influence anything.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.text import Text

from storage.logs.step_log import StepRecord
from tasks.text.live_line import LiveLines
from tasks.text.sanitize import sanitize
from tasks.text.time_left import TimeLeft, bar, clock_time

_PLAIN_EVERY_SECONDS = 10.0
_BAR_CELLS, _LEAST_CELLS = 20, 6


class Progress:
    """Shows steps, probes and messages on stderr."""

    def __init__(
        self,
        total_steps: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        echo: Callable[[str], None] = lambda message: None,
        console: Console | None = None,
    ) -> None:
        """Show progress towards `total_steps`; `echo` is told every line that stays, steps excepted."""
        self._total, self._echo = total_steps, echo
        self._clock = clock
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._live = LiveLines(self._console, stays=True)
        self._left = TimeLeft()
        self._spoken_at = float("-inf")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep a live line while the block runs, where stderr is a terminal."""
        with self._live.shown():
            yield

    def say(self, message: str) -> None:
        """Print a line that stays."""
        self._print(message)
        with suppress(Exception):  # whoever listens costs the words, never the run
            self._echo(message)

    def step(self, record: StepRecord) -> None:
        """Show a completed step; a probe's loss and sample stay on the screen."""
        now = self._clock()
        self._left.add(record.step, now)
        if self._live.are_shown:
            self._live.write([self._fitting_line(record)])
        elif now - self._spoken_at >= _PLAIN_EVERY_SECONDS:
            self._spoken_at = now
            self._print(self._line(record))
        if record.probe_loss is not None:
            sample = "" if record.sample is None else f" · {' '.join(record.sample.split())[:90]!r}"
            self.say(f"  held-out loss {record.probe_loss:.3f} at step {record.step}{sample}")

    def _print(self, message: str) -> None:
        with suppress(OSError):  # a closed terminal or pipe costs the words, never the run
            self._console.print(Text(sanitize(message)), soft_wrap=True)

    def _line(self, record: StepRecord) -> str:
        return " · ".join(self._parts(record))

    def _fitting_line(self, record: StepRecord) -> str:
        """The line as wide as the terminal is now: what matters least is left out, and a bar fills what is left."""
        step, loss, speed, eta = self._parts(record)
        room = self._console.width
        fitting = ([step, loss, speed, eta], [step, loss, eta], [step, eta])
        line = next((line for parts in fitting if len(line := " · ".join(parts)) <= room), step)
        cells = min(_BAR_CELLS, room - len(line) - 1)
        return f"{bar(record.step / self._total, cells)} {line}" if cells >= _LEAST_CELLS else line

    def _parts(self, record: StepRecord) -> tuple[str, str, str, str]:
        return (
            f"step {record.step}/{self._total} ({100 * record.step // self._total} %)",
            f"loss {record.train_loss:.3f}",
            f"{record.tokens_per_second:,.0f} tokens/s",
            f"ETA {clock_time(self._left.seconds(self._total))}",
        )
