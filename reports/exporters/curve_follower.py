"""Follows the curve of a run while it grows: yields each step of the surviving line once, and how far to go back.

The records of an attempt count up to the step at which a later attempt resumed, as in `storage.logs.step_curve`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.logs.run_entries import AttemptEnded, EvaluationRecorded
from storage.logs.run_state import AttemptRecord, RunState
from storage.logs.step_log import StepRecord, StepTail


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """A step record and when it was made, in seconds since 1970: the attempt's start and the time of its steps."""

    at_seconds: float
    record: StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveNews:
    """What is new: first forget every step after `rewind_to`, then take the rest.

    No later attempt goes back before `settled_step` unless a checkpoint turns out unreadable or a spike is rolled back.
    With `more` there is more to be had at once.
    """

    rewind_to: int | None = None
    steps: tuple[TimedStep, ...] = ()
    evaluations: tuple[EvaluationRecorded, ...] = ()
    ends: tuple[AttemptEnded, ...] = ()
    settled_step: int = 0
    more: bool = False


class CurveFollower:
    """Goes through a run's attempts in order, and waits at the newest for more."""

    def __init__(self, tail: StepTail) -> None:
        """Start before the first step."""
        self._tail = tail
        self._place = 0
        self._told_step = 0
        self._elapsed_seconds = 0.0
        self._told_evaluations = self._told_ends = 0

    def follow(self, state: RunState) -> CurveNews:
        """Return what is new, by a state of the run not older than the last one."""
        if not state.attempts:
            return CurveNews()
        attempts = state.attempts
        fresh = self._tail.read(attempts[self._place].started.attempt)
        steps = self._surviving(fresh, attempts)
        moves = not fresh and self._place + 1 < len(attempts)
        rewind_to = self._move_on(attempts) if moves else None
        newest = state.newest_committed
        return CurveNews(
            rewind_to=rewind_to,
            steps=steps,
            evaluations=self._new_evaluations(state),
            ends=self._new_ends(state),
            settled_step=newest.committed.step if newest else 0,
            more=bool(fresh) or moves,
        )

    def _surviving(self, fresh: Sequence[StepRecord], attempts: Sequence[AttemptRecord]) -> tuple[TimedStep, ...]:
        started_at = attempts[self._place].started_at.timestamp()
        bound = min((later.started.first_step for later in attempts[self._place + 1 :]), default=None)
        steps = []
        for record in fresh:
            self._elapsed_seconds += record.seconds
            if record.step > self._told_step and (bound is None or record.step <= bound):
                self._told_step = record.step
                steps.append(TimedStep(at_seconds=started_at + self._elapsed_seconds, record=record))
        return tuple(steps)

    def _move_on(self, attempts: Sequence[AttemptRecord]) -> int | None:
        self._place, self._elapsed_seconds = self._place + 1, 0.0
        resumed = attempts[self._place].started.first_step
        if self._told_step <= resumed:
            return None
        self._told_step = resumed
        return resumed

    def _new_evaluations(self, state: RunState) -> tuple[EvaluationRecorded, ...]:
        """Of the surviving line: what measured a checkpoint that was trained again says nothing of this curve."""
        new = state.evaluations[self._told_evaluations :]
        self._told_evaluations = len(state.evaluations)
        line = {record.committed.manifest_sha256 for record in state.surviving_line} if new else set()
        return tuple(item for item in new if item.manifest_sha256 in line)

    def _new_ends(self, state: RunState) -> tuple[AttemptEnded, ...]:
        ends = tuple(attempt.ended for attempt in state.attempts if attempt.ended is not None)
        new, self._told_ends = ends[self._told_ends :], len(ends)
        return new
