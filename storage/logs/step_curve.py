"""The curve of a run: one point for every step of the surviving line, however often steps were repeated.

Owns the splice of the attempts' step records. An attempt's records survive from the step it set out from up to where a
later attempt resumed: what was trained beyond that point was lost, and trained again. Refuses to know files and charts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from storage.logs.run_state import AttemptRecord
from storage.logs.step_log import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPoint:
    """One step of the surviving line, and how many times it was trained before, by attempts whose work was lost."""

    record: StepRecord
    replays: int


def splice(records: Iterable[StepRecord], attempts: Sequence[AttemptRecord]) -> tuple[StepPoint, ...]:
    """Return the surviving line in step order: no step twice, none of an attempt that was overtaken."""
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
