"""Shows how far running attempts are, and how long the rest takes: live on a terminal, else a line a minute."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from rich.console import Console

from cairn.storage.errors import StorageError
from cairn.storage.logs import run_log, step_log
from cairn.tasks.text import format, live_lines, output

_PLAIN_EVERY_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """The progress of a run with an open attempt; a value that is not known yet is None."""

    run_id: str
    attempt: int
    step: int
    total_steps: int
    train_loss: float | None
    seconds_left: float | None


def read_progress(log: run_log.RunLog) -> RunProgress | None:
    """Return the progress of a run that was read; None without an open attempt or a readable heartbeat."""
    owner, opened, beat = log.state.open_attempt, log.state.opened, None
    if owner is not None:
        with suppress(StorageError):  # reading the log reports what is wrong with the store
            beat = step_log.read_heartbeat(log.store, log.prefix, owner.started.attempt)
    if owner is None or opened is None or beat is None:
        return None
    trained, ahead = beat.step - owner.started.first_step, max(opened.total_steps - beat.step, 0)
    seconds_left = None
    if trained > 0 and beat.gpu_seconds > 0:  # the device time of all ranks
        seconds_left = beat.gpu_seconds / owner.started.placement.world_size / trained * ahead
    return RunProgress(
        run_id=log.run_id,
        attempt=beat.attempt,
        step=beat.step,
        total_steps=opened.total_steps,
        train_loss=beat.train_loss,
        seconds_left=seconds_left,
    )


def format_progress(progress: RunProgress) -> str:
    """Return the progress on one line."""
    so_far = f"step {progress.step}/{progress.total_steps} ({100 * progress.step // progress.total_steps} %)"
    loss = "" if progress.train_loss is None else f" · loss {progress.train_loss:.3f}"
    eta = format.format_clock(progress.seconds_left)
    return f"{progress.run_id}: {so_far}{loss} · attempt {progress.attempt} · ETA {eta}"


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
            if progress.step != step and now - at >= _PLAIN_EVERY_SECONDS:
                self._printed[progress.run_id] = (progress.step, now)
                self._say(format_progress(progress))
