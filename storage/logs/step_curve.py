"""The curve of a run: one point for each step, spliced from the step records of its attempts. Pure.

The records of an attempt survive up to the step from which a later attempt resumed; later steps were trained again.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from storage.logs.run_state import AttemptRecord
from storage.logs.step_log import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPoint:
    """One surviving step, and how many times earlier attempts, whose work was lost, trained it."""

    record: StepRecord
    replays: int


def splice(records: Iterable[StepRecord], attempts: Sequence[AttemptRecord]) -> tuple[StepPoint, ...]:
    """Return the surviving steps in order, each once."""
    of_attempt: dict[int, dict[int, StepRecord]] = {}
    trained = Counter[int]()
    for record in records:
        mine = of_attempt.setdefault(record.attempt, {})
        trained[record.step] += record.step not in mine
        mine.setdefault(record.step, record)
    surviving: list[StepRecord] = []
    bound: float = float("inf")
    for attempt in reversed(attempts):
        first = attempt.started.first_step
        mine = of_attempt.get(attempt.started.attempt, {})
        surviving += (record for step, record in mine.items() if first < step <= bound)
        bound = min(bound, first)
    points = (StepPoint(record=record, replays=trained[record.step] - 1) for record in surviving)
    return tuple(sorted(points, key=lambda point: point.record.step))
