"""The cost of a run: device time kept and lost, idle time, and money where a price is configured."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from reports.queries.receipts import Receipt
from tasks.configuration.settings import CostConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCost:
    """Device time in seconds: all, kept in a commit, lost, and of the open attempt, which is neither yet.

    `elapsed_seconds` is from the opening to the newest entry; in `waiting_seconds` of it no attempt showed life, in
    `unused_seconds` one did not train, and of these it needed `starting_seconds` before it could. `replayed_steps`
    counts how often a step was trained again. Money is an estimate, device hours times the configured price; None
    without a price.
    """

    gpu_seconds: float
    useful_gpu_seconds: float
    wasted_gpu_seconds: float
    open_gpu_seconds: float
    elapsed_seconds: float
    waiting_seconds: float
    unused_seconds: float
    starting_seconds: float
    replayed_steps: int
    gpu_hour_price: float | None
    currency: str
    money: float | None
    wasted_money: float | None

    @property
    def useful_share(self) -> float | None:
        """The share of the settled device time that is kept; None before any is settled."""
        settled = self.useful_gpu_seconds + self.wasted_gpu_seconds
        return self.useful_gpu_seconds / settled if settled else None


def count_cost(
    attempts: Sequence[Receipt], *, replayed_steps: int, price: CostConfig, until: datetime | None
) -> RunCost:
    """Return the cost of these attempts; an open one counts until `until`."""
    gpu = sum(receipt.gpu_seconds for receipt in attempts)
    wasted = sum(receipt.wasted_gpu_seconds or 0.0 for receipt in attempts)
    hourly = price.gpu_hour_price
    waits = [timedelta(seconds=receipt.waiting_seconds) for receipt in attempts]
    ends = [_before(after.started_at, waited) for after, waited in zip(attempts[1:], waits[1:], strict=True)]
    ends += [receipt.ended_at or until or receipt.started_at for receipt in attempts[-1:]]
    open_seconds = [_seconds(receipt.started_at, end) for receipt, end in zip(attempts, ends, strict=True)]
    busy = [receipt.gpu_seconds / receipt.placement.world_size for receipt in attempts]
    return RunCost(
        gpu_seconds=gpu,
        useful_gpu_seconds=sum(receipt.useful_gpu_seconds or 0.0 for receipt in attempts),
        wasted_gpu_seconds=wasted,
        open_gpu_seconds=sum(receipt.gpu_seconds for receipt in attempts if receipt.termination_reason is None),
        elapsed_seconds=_seconds(_before(attempts[0].started_at, waits[0]), ends[-1]) if attempts else 0.0,
        waiting_seconds=sum(receipt.waiting_seconds for receipt in attempts),
        unused_seconds=sum(max(wall - work, 0.0) for wall, work in zip(open_seconds, busy, strict=True)),
        starting_seconds=sum(receipt.starting_seconds or 0.0 for receipt in attempts),
        replayed_steps=replayed_steps,
        gpu_hour_price=hourly,
        currency=price.currency,
        money=None if hourly is None else gpu / 3600 * hourly,
        wasted_money=None if hourly is None else wasted / 3600 * hourly,
    )


def _before(moment: datetime, waited: timedelta) -> datetime:
    """Return the moment so long before; the first there is, where a log says that it was before that."""
    return moment - min(waited, moment - datetime.min.replace(tzinfo=moment.tzinfo))


def _seconds(first: datetime, second: datetime) -> float:
    return max((second - first).total_seconds(), 0.0)
