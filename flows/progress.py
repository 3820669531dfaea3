"""What a person sees while a run trains: one live line on a terminal, sparse plain lines elsewhere.

Owns the looks. Called from the trainer's listening thread; refuses to influence anything.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tasks.trainer_protocol import StepDone

_PLAIN_EVERY_SECONDS = 10.0


class Progress:
    """Shows steps, probes and messages on stderr."""

    def __init__(
        self,
        total_steps: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        echo: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Show progress towards `total_steps`; `echo` is told every line that stays, steps excepted."""
        self._total, self._echo = total_steps, echo
        self._clock = clock
        self._console = Console(file=sys.stderr, highlight=False)
        self._live: Live | None = None
        self._spoken_at = float("-inf")
        self._first: tuple[int, float] | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep a live line while the block runs, where stderr is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, refresh_per_second=8, transient=False) as self._live:
            yield
        self._live = None

    def say(self, message: str) -> None:
        """Print a line that stays."""
        self._print(message)
        with suppress(Exception):  # whoever listens costs the words, never the run
            self._echo(message)

    def step(self, done: StepDone) -> None:
        """Show a completed step; a probe's loss and sample stay on the screen."""
        now = self._clock()
        self._first = self._first or (done.step, now)
        line = self._line(done, now)
        if self._live is not None:
            self._live.update(Text(line))
        elif now - self._spoken_at >= _PLAIN_EVERY_SECONDS:
            self._spoken_at = now
            self._print(line)
        if done.probe_loss is not None:
            sample = "" if done.sample is None else f" · {' '.join(done.sample.split())[:90]!r}"
            self.say(f"  held-out loss {done.probe_loss:.3f} at step {done.step}{sample}")

    def _print(self, message: str) -> None:
        with suppress(OSError):  # a closed terminal or pipe costs the words, never the run
            self._console.print(Text(message), soft_wrap=True)

    def _line(self, done: StepDone, now: float) -> str:
        first_step, first_time = self._first or (done.step, now)
        trained = done.step - first_step
        left = (now - first_time) / trained * (self._total - done.step) if trained else 0.0
        eta = f"{int(left) // 60}:{int(left) % 60:02d}" if trained else "–"
        percent = 100 * done.step // self._total
        return (
            f"step {done.step}/{self._total} ({percent} %) · loss {done.train_loss:.3f} · "
            f"{done.tokens_per_second:,.0f} tokens/s · ETA {eta}"
        )
