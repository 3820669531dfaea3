"""Progress of training, and of making a snapshot: a live line with a bar on a terminal, else one every ten seconds.

Work beside and after the steps (an evaluation, a commit, a wait) is named below it for as long as it lasts. The runs of
other processes have a line each, and how long the rest takes; without a terminal, one a minute.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from cairn.reports.queries.run_lookup import read_beat
from cairn.storage.errors import StorageError
from cairn.storage.logs import run_log, step_log
from cairn.tasks.text import format, live_lines

if TYPE_CHECKING:
    from cairn.tasks.data.snapshot_build import BuildProgress, BuildStage

_PLAIN_EVERY_SECONDS, _WATCHED_EVERY_SECONDS = 10.0, 60.0


class Progress:
    """Shows steps, probes and messages on stderr."""

    def __init__(
        self,
        total_steps: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        echo: Callable[[str], None] | None = None,
        console: Console | None = None,
    ) -> None:
        """Show progress towards `total_steps`; `echo` gets every message, but no steps."""
        self._total, self._echo, self._clock = total_steps, echo, clock
        self._live = live_lines.LiveLines(console, stays=True)
        self._done: tuple[tuple[int, float], ...] = ()
        """The newest steps with their times: a restart or a slow start is soon forgotten."""
        self._printed_at = float("-inf")
        self._newest: step_log.StepRecord | None = None
        self._doing: dict[str, float | None] = {}

    def showing(self) -> AbstractContextManager[None]:
        """Keep a live line while the block runs, where stderr is a terminal."""
        return self._live.show()

    def pace(self) -> str:
        """Return speed and time left, as the live line has them; "" before the first step."""
        return ", ".join(self._parts()[2:])

    def say(self, message: str) -> None:
        """Print a line that stays."""
        self._live.say(message)
        with suppress(Exception):  # a failing echo costs the message, never the run
            if self._echo is not None:
                self._echo(message)

    def step(self, record: step_log.StepRecord) -> None:
        """Show a completed step; a probe's loss and sample stay on the screen."""
        before = self._done if self._done and self._done[-1][0] < record.step else ()
        self._done = (*before, (record.step, self._clock()))[-64:]
        self._newest = record
        self._show()
        if record.probe_loss is not None:
            sample = "" if record.sample is None else f" · {' '.join(record.sample.split())[:90]!r}"
            self.say(f"  probe of the held-out text at step {record.step}: loss {record.probe_loss:.3f}{sample}")

    @contextmanager
    def doing(self, what: str) -> Iterator[Callable[[float], None]]:
        """Say `what` is going on while the block runs, in any thread; yields a function that takes the share done."""

        def note(share: float) -> None:
            self._doing[what] = share
            self._show()

        self._doing[what] = None
        self._show(is_news=False)
        try:
            yield note
        finally:
            self._doing.pop(what, None)
            self._show(is_news=False)

    def _show(self, *, is_news: bool = True) -> None:
        now, newest, shares = self._clock(), self._newest, self._doing.copy().items()
        doing = " · ".join(what if share is None else f"{what}, {100 * share:.0f} %" for what, share in shares)
        parts = self._parts()
        if self._live.are_shown:  # without the least important parts, and a bar in the rest of the terminal's width
            done, *rest = parts or [""]
            fitting = (parts, [done, *rest[:1], *rest[2:]], [done, *rest[2:]])
            line = next((line for some in fitting if len(line := " · ".join(some)) <= self._live.console.width), done)
            cells = min(20, self._live.console.width - len(line) - 1) if newest else 0
            drawn = f"{format.format_bar(newest.step / self._total, cells)} {line}" if newest and cells >= 6 else line
            self._live.write([text for text in (drawn, doing) if text])
        elif is_news and (parts or doing) and now - self._printed_at >= _PLAIN_EVERY_SECONDS:
            self._printed_at = now
            self._live.say(" · ".join([*parts, *filter(None, [doing])]))

    def _parts(self) -> list[str]:
        if (record := self._newest) is None:
            return []
        (first, began), (last, ended) = self._done[0], self._done[-1]
        left = (ended - began) / (last - first) * max(self._total - last, 0) if last > first else None
        return [
            f"step {record.step}/{self._total} ({100 * record.step // self._total} %)",
            f"loss {record.train_loss:.3f}",
            f"{record.tokens_per_second:,.0f} tokens/s",
            f"ETA {format.format_clock(left)}",
        ]


class TextProgress:
    """Shows how far a snapshot is; without a terminal, nothing in the first ten seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, console: Console | None = None) -> None:
        self._clock = clock
        self._live = live_lines.LiveLines(console, stays=False)
        self._stage: BuildStage | None = None
        self._begun: tuple[float, int] = (0.0, 0)
        self._printed_at = clock()

    def showing(self) -> AbstractContextManager[None]:
        """Keep a live line while the block runs, where the console is a terminal; it is gone afterwards."""
        return self._live.show()

    def __call__(self, progress: "BuildProgress") -> None:
        """Show the newest progress."""
        now = self._clock()
        if progress.stage is not self._stage:
            self._stage, self._begun = progress.stage, (now, progress.bytes_done)
        if self._live.are_shown:
            self._live.write([self._line(progress, now, drawn=True)])
        elif now - self._printed_at >= _PLAIN_EVERY_SECONDS:
            self._printed_at = now
            self._live.say(self._line(progress, now, drawn=False))

    def _line(self, progress: "BuildProgress", now: float, *, drawn: bool) -> str:
        share = progress.bytes_done / progress.bytes_total if progress.bytes_total else 0.0
        cells = f" {format.format_bar(share, 24)}" if drawn else ""
        seconds, done = now - self._begun[0], progress.bytes_done - self._begun[1]
        left = (progress.bytes_total - progress.bytes_done) * seconds / done if done else None
        documents = f"{progress.documents:,} documents · " if progress.documents else ""
        sizes = " of ".join(map(format.format_quantity, (progress.bytes_done, progress.bytes_total)))
        speed = format.format_quantity(done / seconds if seconds > 0 else 0.0, "B/s")
        return (
            f"{progress.stage.value} text{cells} {100 * share:.0f} % · {sizes} · {documents}{speed} · "
            f"ETA {format.format_clock(left)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """The step that a run's open attempt has reached, and the line that shows it with the time left."""

    run_id: str
    step: int
    line: str


def read_progress(log: run_log.RunLog) -> RunProgress | None:
    """Return the progress of a run that was read; None without an open attempt or a readable heartbeat."""
    owner, opened, beat = log.state.open_attempt, log.state.opened, None
    with suppress(StorageError):  # reading the log reports what is wrong with the store
        beat = read_beat(log)
    if owner is None or opened is None or beat is None:
        return None
    trained, ahead = beat.step - owner.started.first_step, max(opened.total_steps - beat.step, 0)
    seconds_left = None
    if trained > 0 and beat.gpu_seconds > 0:  # the device time of all ranks
        seconds_left = beat.gpu_seconds / owner.started.placement.devices / trained * ahead
    so_far = f"step {beat.step}/{opened.total_steps} ({100 * beat.step // opened.total_steps} %)"
    loss = "" if beat.train_loss is None else f" · loss {beat.train_loss:.3f}"
    line = f"{log.run_id}: {so_far}{loss} · attempt {beat.attempt} · ETA {format.format_clock(seconds_left)}"
    return RunProgress(run_id=log.run_id, step=beat.step, line=line)


@contextmanager
def showing_progress(
    say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic, console: Console | None = None
) -> Iterator[Callable[[Sequence[RunProgress]], None]]:
    """Yield a function that shows the progress of runs: at the bottom of a terminal, elsewhere with `say`."""
    # News goes to stdout, so the live lines have to be on the same terminal.
    live = live_lines.LiveLines(console or live_lines.console_of(sys.stdout), stays=False)
    printed: dict[str, tuple[int, float]] = {}

    def show(runs: Sequence[RunProgress]) -> None:
        if live.are_shown:
            live.write([progress.line for progress in runs])
            return
        now = clock()
        for progress in runs:
            step, at = printed.get(progress.run_id, (-1, float("-inf")))
            if progress.step != step and now - at >= _WATCHED_EVERY_SECONDS:
                printed[progress.run_id] = (progress.step, now)
                say(progress.line)

    with live.show():
        yield show
