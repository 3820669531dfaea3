"""Shows how far running attempts are, and how long the rest takes: live on a terminal, else a line a minute."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.console import Console

from cairn.reports.queries.run_lookup import read_beat
from cairn.storage.errors import StorageError
from cairn.storage.logs import run_log
from cairn.tasks.text import format, live_lines

_PLAIN_EVERY_SECONDS = 60.0


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
            if progress.step != step and now - at >= _PLAIN_EVERY_SECONDS:
                printed[progress.run_id] = (progress.step, now)
                say(progress.line)

    with live.show():
        yield show
