"""How far a running attempt says it is: its heartbeat, and how long the rest takes at the speed it had so far.

Owns the pulse of one run, for people who watch. Nothing is decided by it. Refuses to look at step records: a heartbeat
is one small object, however long the run.
"""

from dataclasses import dataclass

from storage.errors import StorageError
from storage.logs.heartbeat import Heartbeat, read_heartbeat
from storage.logs.run_log import RunLog
from tasks.text.time_left import clock_time


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPulse:
    """A run whose attempt is open: where it is, its loss, and the seconds its steps ahead take; None: not known yet."""

    run_id: str
    attempt: int
    step: int
    total_steps: int
    train_loss: float | None
    seconds_left: float | None


def pulse_of(log: RunLog) -> RunPulse | None:
    """Return the pulse of a run that was read; None where no attempt is open, or its heartbeat cannot be read."""
    owner, opened = log.state.open_attempt, log.state.opened
    if owner is None or opened is None:
        return None
    try:
        beat = read_heartbeat(log.store, log.prefix, owner.started.attempt)
    except StorageError:  # a look at the log says what is wrong with the store
        return None
    if beat is None:
        return None
    return RunPulse(
        run_id=log.run_id,
        attempt=owner.started.attempt,
        step=beat.step,
        total_steps=opened.total_steps,
        train_loss=beat.train_loss,
        seconds_left=_seconds_left(beat, owner.started.first_step, opened.total_steps),
    )


def pulse_line(pulse: RunPulse) -> str:
    """Return the pulse on one line."""
    share = 100 * pulse.step // pulse.total_steps
    loss = "" if pulse.train_loss is None else f" · loss {pulse.train_loss:.3f}"
    eta = clock_time(pulse.seconds_left)
    return (
        f"{pulse.run_id}: step {pulse.step}/{pulse.total_steps} ({share} %){loss} · attempt {pulse.attempt} · ETA {eta}"
    )


def _seconds_left(beat: Heartbeat, first: int, total: int) -> float | None:
    trained = beat.step - first
    return beat.gpu_seconds / trained * max(total - beat.step, 0) if trained > 0 and beat.gpu_seconds > 0 else None
