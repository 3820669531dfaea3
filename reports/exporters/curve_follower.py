"""Follows the curve of a run while it grows: yields each step of the surviving line once, and how far to go back.

The records of an attempt count up to the step at which a later attempt resumed, as in `cairn.storage.logs.step_log`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cairn.storage.logs import run_entries, run_state, step_log

_STEP_VALUES = {
    "train/loss": "train_loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "speed/tokens_per_second": "tokens_per_second",
    "speed/mfu": "mfu",
    "probe/loss": "probe_loss",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Values of a step by `group/name`, and their time in seconds since 1970; `attempt` trained it, 0 if evaluated."""

    step: int
    attempt: int
    at_seconds: float
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveUpdate:
    """The news of a curve. The receiver first drops every step after `rewind_to`, then adds the rest.

    `settled` are the steps that are committed now, for receivers that take nothing back; they are trained again only
    where a checkpoint is unreadable or a spike is rolled back. `more` says that the next call has more.
    """

    rewind_to: int | None = None
    steps: tuple[Point, ...] = ()
    settled: tuple[Point, ...] = ()
    evaluations: tuple[Point, ...] = ()
    ends: tuple[run_entries.AttemptEnded, ...] = ()
    more: bool = False


class CurveFollower:
    """Reads a run's attempts in order and stays at the newest."""

    def __init__(self, tail: step_log.StepTail) -> None:
        self._tail = tail
        self._position = self._sent_step = self._sent_evaluations = self._sent_ends = 0
        self._elapsed_seconds = 0.0
        self._unsettled: list[Point] = []

    def follow(self, state: run_state.RunState) -> CurveUpdate:
        """Return what is new since the last call; `state` must not be older than that of the last call."""
        if not state.attempts:
            return CurveUpdate()
        attempts = state.attempts
        started = attempts[self._position].started
        fresh = self._tail.read(started.attempt, started.claim_id)
        started_at = attempts[self._position].started_at.timestamp()
        bound = min((later.started.first_step for later in attempts[self._position + 1 :]), default=None)
        steps = []
        for record in fresh:
            self._elapsed_seconds += record.seconds
            if record.step > self._sent_step and (bound is None or record.step <= bound):
                self._sent_step = record.step
                values = {shown: getattr(record, name) for shown, name in _STEP_VALUES.items()}
                known = {shown: value for shown, value in values.items() if value is not None}
                at_seconds = started_at + self._elapsed_seconds
                steps.append(Point(step=record.step, attempt=record.attempt, at_seconds=at_seconds, values=known))
        moves, rewind_to = not fresh and self._position + 1 < len(attempts), None
        if moves:
            self._position, self._elapsed_seconds = self._position + 1, 0.0
            resumed = attempts[self._position].started.first_step
            if self._sent_step > resumed:
                rewind_to = self._sent_step = resumed
                self._unsettled = [point for point in self._unsettled if point.step <= resumed]
        newest, evaluations = state.newest_committed, state.evaluations[self._sent_evaluations :]
        unsettled = [*self._unsettled, *steps]
        settled = [point for point in unsettled if newest and point.step <= newest.committed.step]
        self._unsettled = unsettled[len(settled) :]
        ends = [attempt.ended for attempt in attempts if attempt.ended is not None]
        line = {record.committed.manifest_sha256 for record in state.surviving_checkpoints} if evaluations else set()
        update = CurveUpdate(
            rewind_to=rewind_to,
            steps=tuple(steps),
            settled=tuple(settled),
            evaluations=tuple(_measured(item) for item in evaluations if item.manifest_sha256 in line),
            ends=tuple(ends[self._sent_ends :]),
            more=bool(fresh) or moves,
        )
        self._sent_evaluations, self._sent_ends = len(state.evaluations), len(ends)
        return update


def _measured(item: run_entries.EvaluationRecorded) -> Point:
    values = {f"{item.suite}/{name}": value for name, value in item.metrics.items()}
    return Point(step=item.step, attempt=0, at_seconds=item.started_at.timestamp() + item.seconds, values=values)
