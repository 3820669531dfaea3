"""What a run has cost: device time kept and lost, time nobody trained, and money where a price is known.

Owns the arithmetic. Money is an estimate: device hours times a configured price, nothing else. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from reports.queries.receipts import Receipt
from tasks.configuration.settings import CostConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCost:
    """Device time in seconds: in all, of it kept in a commit and lost; `open_gpu_seconds` belong to neither yet.

    `elapsed_seconds` is from the first start to the last sign in the log, `between_seconds` of it no attempt was open,
    `unused_seconds` an attempt was open and did not train: starting, waiting, or gone before that was noticed.
    `replayed_steps` counts how often a step was trained again. Money is an estimate, None without a price.
    """

    gpu_seconds: float
    useful_gpu_seconds: float
    wasted_gpu_seconds: float
    open_gpu_seconds: float
    elapsed_seconds: float
    between_seconds: float
    unused_seconds: float
    replayed_steps: int
    gpu_hour_price: float | None
    currency: str
    money: float | None
    wasted_money: float | None

    @property
    def useful_share(self) -> float | None:
        """The part of the settled device time that is kept; None before there is any."""
        settled = self.useful_gpu_seconds + self.wasted_gpu_seconds
        return self.useful_gpu_seconds / settled if settled else None


def count_cost(
    attempts: Sequence[Receipt], *, replayed_steps: int, price: CostConfig, until: datetime | None
) -> RunCost:
    """Return the bill of these attempts; one that is open counts until `until`."""
    gpu = sum(view.gpu_seconds for view in attempts)
    wasted = sum(view.wasted_gpu_seconds or 0.0 for view in attempts)
    hourly = price.gpu_hour_price
    ends = [view.ended_at or until or view.started_at for view in attempts]
    gaps = (_seconds(end, view.started_at) for end, (_, view) in zip(ends, pairwise(attempts), strict=False))
    open_seconds = [_seconds(view.started_at, end) for view, end in zip(attempts, ends, strict=True)]
    busy = [view.gpu_seconds / view.placement.world_size for view in attempts]
    return RunCost(
        gpu_seconds=gpu,
        useful_gpu_seconds=sum(view.useful_gpu_seconds or 0.0 for view in attempts),
        wasted_gpu_seconds=wasted,
        open_gpu_seconds=sum(view.gpu_seconds for view in attempts if view.termination_reason is None),
        elapsed_seconds=_seconds(attempts[0].started_at, ends[-1]) if attempts else 0.0,
        between_seconds=sum(gaps),
        unused_seconds=sum(max(wall - work, 0.0) for wall, work in zip(open_seconds, busy, strict=True)),
        replayed_steps=replayed_steps,
        gpu_hour_price=hourly,
        currency=price.currency,
        money=None if hourly is None else gpu / 3600 * hourly,
        wasted_money=None if hourly is None else wasted / 3600 * hourly,
    )


def _seconds(first: datetime, second: datetime) -> float:
    return max((second - first).total_seconds(), 0.0)
