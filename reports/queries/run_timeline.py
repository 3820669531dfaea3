"""Attempts as stretches of equal ends, and reasons, rarest first: 7 real failures show among 1,785 preemptions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from reports.queries.receipts import Receipt

OPEN = "open"
PRACTISED = " (practised)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive attempts that ended for the same reason, all practised or none; `open` for one that has not ended."""

    reason: str
    attempts: tuple[Receipt, ...]

    @property
    def first(self) -> Receipt:
        """The oldest attempt of the stretch."""
        return self.attempts[0]

    @property
    def last(self) -> Receipt:
        """The newest attempt of the stretch."""
        return self.attempts[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonRow:
    """All attempts that ended for one reason: how many, the newest of them, what they cost, the newest detail."""

    reason: str
    attempts: int
    gpu_seconds: float
    wasted_gpu_seconds: float
    last_attempt: int
    last_at: datetime | None
    last_detail: str


def group_receipts(receipts: Iterable[Receipt]) -> tuple[Stretch, ...]:
    """Return the attempts in order, neighbours with the same reason as one stretch; practice is never hidden in one."""
    grouped = groupby(receipts, key=lambda receipt: (receipt.termination_reason or OPEN, bool(receipt.practised)))
    return tuple(Stretch(reason=reason, attempts=tuple(group)) for (reason, _), group in grouped)


def count_reasons(receipts: Sequence[Receipt]) -> tuple[ReasonRow, ...]:
    """Return one row for each reason, the rarest first; of equally rare ones the newest first."""
    by_reason: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        practised = PRACTISED if receipt.practised else ""
        by_reason.setdefault(f"{receipt.termination_reason or OPEN}{practised}", []).append(receipt)
    rows = (
        ReasonRow(
            reason=reason,
            attempts=len(group),
            gpu_seconds=sum(receipt.gpu_seconds for receipt in group),
            wasted_gpu_seconds=sum(receipt.wasted_gpu_seconds or 0.0 for receipt in group),
            last_attempt=group[-1].attempt,
            last_at=group[-1].ended_at,
            last_detail=group[-1].detail or "",
        )
        for reason, group in by_reason.items()
    )
    return tuple(sorted(rows, key=lambda row: (row.attempts, -row.last_attempt)))
