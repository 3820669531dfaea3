"""Attempts in order, with equal neighbours as one stretch, and why they ended, the rare reasons first.

Owns that 7 real failures are not buried under 1,785 preemptions. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from reports.queries.run_views import AttemptView

OPEN = "open"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive attempts that ended for the same reason, `open` for one that has not ended."""

    reason: str
    attempts: tuple[AttemptView, ...]

    @property
    def first(self) -> AttemptView:
        """The attempt it begins with."""
        return self.attempts[0]

    @property
    def last(self) -> AttemptView:
        """The attempt it ends with."""
        return self.attempts[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonRow:
    """All attempts that ended for one reason: how many, which was the last, what they cost, what was said last."""

    reason: str
    attempts: int
    gpu_seconds: float
    wasted_gpu_seconds: float
    last_attempt: int
    last_at: datetime | None
    last_detail: str


def stretches(attempts: Iterable[AttemptView]) -> tuple[Stretch, ...]:
    """Return the attempts in order, equal neighbours together."""
    grouped = groupby(attempts, key=lambda view: view.termination_reason or OPEN)
    return tuple(Stretch(reason=reason, attempts=tuple(views)) for reason, views in grouped)


def reasons(attempts: Sequence[AttemptView]) -> tuple[ReasonRow, ...]:
    """Return one row for each reason, the rarest first, among equals the one that happened last."""
    found: dict[str, list[AttemptView]] = {}
    for view in attempts:
        found.setdefault(view.termination_reason or OPEN, []).append(view)
    rows = (
        ReasonRow(
            reason=reason,
            attempts=len(views),
            gpu_seconds=sum(view.gpu_seconds for view in views),
            wasted_gpu_seconds=sum(view.wasted_gpu_seconds or 0.0 for view in views),
            last_attempt=views[-1].attempt,
            last_at=views[-1].ended_at,
            last_detail=views[-1].detail or "",
        )
        for reason, views in found.items()
    )
    return tuple(sorted(rows, key=lambda row: (row.attempts, -row.last_attempt)))
