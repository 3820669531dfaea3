"""The attempts of a run as a bar over time, in SVG: how long each was open, and what it ended for.

Owns where each lies and what it is called. Colour is never alone: every bar has a title, the legend names the colours,
the table below has the same facts. Refuses to know any other part of a page.
"""

import html
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from reports.queries.receipts import Receipt
from reports.queries.run_timeline import OPEN, group_receipts
from tasks.policy.termination import TerminationReason
from tasks.text.format import format_duration, format_value, one_line

_WIDTH, _HEIGHT, _BAR = 1000.0, 62.0, 34.0
_LEAST_WIDTH = 1.5
_MOST_BARS = 600
_KNOWN: frozenset[str] = frozenset({*TerminationReason, OPEN})


def css_class(reason: str) -> str:
    """Return the class that colours a reason, `preempted × 214` too; an unknown one has its own."""
    name = reason.split(" × ")[0]
    return f"r-{name}" if name in _KNOWN else "r-other"


def timeline_svg(attempts: Sequence[Receipt], text: str) -> str:
    """Return the bar; more attempts than are worth a bar each are drawn as stretches of equal ends."""
    bars = list(_bars(attempts))
    begin, end = bars[0][0], max(bar[1] for bar in bars)
    scale = _WIDTH / ((end - begin).total_seconds() or 1.0)
    drawn = "".join(_bar(bar, begin, scale) for bar in bars)
    reasons = dict.fromkeys(bar[2] for bar in bars)
    legend = "".join(
        f'<li><span class="chip {css_class(reason)}">{html.escape(reason)}</span></li>' for reason in reasons
    )
    middle = begin + (end - begin) / 2
    words = "".join(
        f'<text x="{at:g}" y="{_HEIGHT - 6:g}" text-anchor="{anchor}">{format_value(when)}</text>'
        for at, anchor, when in ((0, "start", begin), (_WIDTH / 2, "middle", middle), (_WIDTH, "end", end))
    )
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{html.escape(text)}">'
        f'<rect class="ground" width="{_WIDTH:g}" height="{_BAR:g}"/>{drawn}{words}</svg>'
        f'<ul class="legend" aria-label="what the colours mean">{legend}</ul>'
    )


def _bars(attempts: Sequence[Receipt]) -> Iterator[tuple[datetime, datetime, str, str]]:
    """Yield begin, end, reason and title of each bar."""
    if len(attempts) <= _MOST_BARS:
        for view in attempts:
            end, reason = view.ended_at or _last_sign(view), view.termination_reason or OPEN
            steps = f"steps {view.first_step:,} to {view.last_step:,}"
            lasted = format_duration((end - view.started_at).total_seconds())
            yield view.started_at, end, reason, f"attempt {view.attempt}: {reason}, {steps}, {lasted}"
        return
    for item in group_receipts(attempts):
        end = item.last.ended_at or _last_sign(item.last)
        title = f"attempts {item.first.attempt} to {item.last.attempt}: {item.reason}"
        yield item.first.started_at, end, item.reason, title


def _last_sign(view: Receipt) -> datetime:
    """Return up to when an open attempt is known to have trained."""
    return view.started_at + timedelta(seconds=view.gpu_seconds / view.placement.world_size)


def _bar(bar: tuple[datetime, datetime, str, str], begin: datetime, scale: float) -> str:
    first, last, reason, title = bar
    width = max((last - first).total_seconds() * scale, _LEAST_WIDTH)
    left = min((first - begin).total_seconds() * scale, _WIDTH - width)
    return (
        f'<rect class="{css_class(reason)}" x="{left:.2f}" width="{width:.2f}" height="{_BAR:g}">'
        f"<title>{html.escape(one_line(title))}</title></rect>"
    )
