"""How far a running attempt is, by its heartbeat, and how long the rest takes; only for display."""

from dataclasses import dataclass

from storage.errors import StorageError
from storage.logs.heartbeat import Heartbeat, read_heartbeat
from storage.logs.run_log import RunLog
from tasks.text.format import format_clock


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPulse:
    """The progress of a run with an open attempt; None stands for what is not known yet."""

    run_id: str
    attempt: int
    step: int
    total_steps: int
    train_loss: float | None
    seconds_left: float | None


def pulse_of(log: RunLog) -> RunPulse | None:
    """Return the pulse of a run that was read; None without an open attempt or a readable heartbeat."""
    owner, opened = log.state.open_attempt, log.state.opened
    if owner is None or opened is None:
        return None
    try:
        beat = read_heartbeat(log.store, log.prefix, owner.started.attempt)
    except StorageError:  # reading the log reports what is wrong with the store
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
    eta = format_clock(pulse.seconds_left)
    return (
        f"{pulse.run_id}: step {pulse.step}/{pulse.total_steps} ({share} %){loss} · attempt {pulse.attempt} · ETA {eta}"
    )


def _seconds_left(beat: Heartbeat, first: int, total: int) -> float | None:
    trained = beat.step - first
    return beat.gpu_seconds / trained * max(total - beat.step, 0) if trained > 0 and beat.gpu_seconds > 0 else None
