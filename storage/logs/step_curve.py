"""The curve of a run: one point for every step of the surviving line, however often steps were repeated.

Owns the splice of the attempts' step records. An attempt's records survive from the step it set out from up to where a
later attempt resumed: what was trained beyond that point was lost, and trained again. Refuses to know files and charts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from storage.logs.run_state import AttemptRecord
from storage.logs.step_log import StepLine


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPoint:
    """One step of the surviving line, and how many times it was trained before, by attempts whose work was lost."""

    line: StepLine
    replays: int


def splice(lines: Iterable[StepLine], attempts: Sequence[AttemptRecord]) -> tuple[StepPoint, ...]:
    """Return the surviving line in step order: no step twice, none of an attempt that was overtaken."""
    of_attempt: dict[int, dict[int, StepLine]] = {}
    trained = Counter[int]()
    for line in lines:
        mine = of_attempt.setdefault(line.attempt, {})
        trained[line.step] += line.step not in mine
        mine.setdefault(line.step, line)
    surviving: list[StepLine] = []
    bound: float = float("inf")
    for attempt in reversed(attempts):
        first = attempt.started.first_step
        mine = of_attempt.get(attempt.started.attempt, {})
        surviving += (line for step, line in mine.items() if first < step <= bound)
        bound = min(bound, first)
    points = (StepPoint(line=line, replays=trained[line.step] - 1) for line in surviving)
    return tuple(sorted(points, key=lambda point: point.line.step))
