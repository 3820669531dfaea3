"""Shows how far running attempts are, and how long the rest takes: live on a terminal, else a line a minute."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from rich.console import Console

from cairn.reports.queries.run_lookup import read_beat
from cairn.storage.errors import StorageError
from cairn.storage.logs import run_log, step_log
from cairn.tasks.text import format, live_lines, output

_PLAIN_EVERY_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """The heartbeat of a run's open attempt, and the time left, None before the first step."""

    run_id: str
    beat: step_log.Heartbeat
    total_steps: int
    seconds_left: float | None


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
        seconds_left = beat.gpu_seconds / owner.started.placement.world_size / trained * ahead
    return RunProgress(run_id=log.run_id, beat=beat, total_steps=opened.total_steps, seconds_left=seconds_left)


def format_progress(progress: RunProgress) -> str:
    """Return the progress on one line."""
    beat, eta = progress.beat, format.format_clock(progress.seconds_left)
    so_far = f"step {beat.step}/{progress.total_steps} ({100 * beat.step // progress.total_steps} %)"
    loss = "" if beat.train_loss is None else f" · loss {beat.train_loss:.3f}"
    return f"{progress.run_id}: {so_far}{loss} · attempt {beat.attempt} · ETA {eta}"


class WatchDisplay:
    """Shows the progress of runs."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
        say: Callable[[str], None] = output.say,
    ) -> None:
        """Show live lines if stdout is a terminal, else print them with `say`."""
        # News goes to stdout, so the live lines have to be on the same terminal.
        self._live = live_lines.LiveLines(console or Console(file=sys.stdout, highlight=False), stays=False)
        self._clock, self._say = clock, say
        self._printed: dict[str, tuple[int, float]] = {}

    def showing(self) -> AbstractContextManager[None]:
        """Keep the lines at the bottom of a terminal while the block runs."""
        return self._live.show()

    def show(self, runs: Sequence[RunProgress]) -> None:
        """Show the progress of the runs that train now."""
        if self._live.are_shown:
            self._live.write([format_progress(progress) for progress in runs])
            return
        now = self._clock()
        for progress in runs:
            step, at = self._printed.get(progress.run_id, (-1, float("-inf")))
            if progress.beat.step != step and now - at >= _PLAIN_EVERY_SECONDS:
                self._printed[progress.run_id] = (progress.beat.step, now)
                self._say(format_progress(progress))
