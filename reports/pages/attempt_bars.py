"""The attempts of a run as bars over time: where each bar lies, what it is called and which colour class it has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from reports.queries.receipts import OPEN, PRACTISED, Receipt, group_receipts
from tasks.policy.termination import TerminationReason
from tasks.text.format import format_duration

_WIDTH, _HEIGHT, _BAR_HEIGHT = 1000, 62, 34
_LEAST_WIDTH = 1.5
_MOST_BARS = 600
_KNOWN: frozenset[str] = frozenset({*TerminationReason, OPEN})


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar: its place and width in units of the drawing, the reason it is coloured by, and its title."""

    left: float
    width: float
    reason: str
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptBars:
    """The drawing, `width` by `height` units, from `begin` to `end`; `reasons` are those that occur, for the legend."""

    bars: tuple[Bar, ...]
    begin: datetime
    end: datetime
    reasons: tuple[str, ...]
    width: int = _WIDTH
    height: int = _HEIGHT
    bar_height: int = _BAR_HEIGHT


def place_bars(attempts: Sequence[Receipt]) -> AttemptBars | None:
    """Return one bar an attempt, above 600 attempts one for each stretch of equal ends; None without attempts."""
    spans = list(_spans(attempts))
    if not spans:
        return None
    begin, end = spans[0][0], max(span[1] for span in spans)
    scale = _WIDTH / ((end - begin).total_seconds() or 1.0)
    bars = []
    for first, last, reason, title in spans:
        width = max((last - first).total_seconds() * scale, _LEAST_WIDTH)
        left = min((first - begin).total_seconds() * scale, _WIDTH - width)
        bars.append(Bar(left=left, width=width, reason=reason, title=title))
    return AttemptBars(bars=tuple(bars), begin=begin, end=end, reasons=tuple(dict.fromkeys(span[2] for span in spans)))


def css_class(reason: str) -> str:
    """Return the CSS class that colours a reason, also of `preempted × 214`; `r-other` where it is unknown."""
    name = reason.split(" × ")[0].removesuffix(PRACTISED)
    return f"r-{name}" if name in _KNOWN else "r-other"


def _spans(attempts: Sequence[Receipt]) -> Iterator[tuple[datetime, datetime, str, str]]:
    """Yield begin, end, reason and title of each bar."""
    if len(attempts) <= _MOST_BARS:
        for receipt in attempts:
            end, reason = _end_of(receipt), receipt.termination_reason or OPEN
            steps = f"steps {receipt.first_step:,} to {receipt.last_step:,}"
            lasted = format_duration((end - receipt.started_at).total_seconds())
            yield receipt.started_at, end, reason, f"attempt {receipt.attempt}: {reason}, {steps}, {lasted}"
        return
    for item in group_receipts(attempts):
        title = f"attempts {item.first.attempt} to {item.last.attempt}: {item.reason}"
        yield item.first.started_at, _end_of(item.last), item.reason, title


def _end_of(receipt: Receipt) -> datetime:
    """Return when the attempt ended; of an open one, up to when it is known to have trained."""
    trained = timedelta(seconds=receipt.gpu_seconds / receipt.placement.world_size)
    return receipt.ended_at or receipt.started_at + trained
