"""Whether a run's next segment fits within `cost.limit`: device hours, or money where a device hour has a price."""

from dataclasses import dataclass

from cairn.storage.logs.run_state import RunState
from cairn.tasks.configuration.settings import CostConfig
from cairn.tasks.text.format import format_money


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """The device seconds of a run's attempts, and the steps that they trained, those that were lost too."""

    device_seconds: float = 0.0
    steps: int = 0

    @property
    def seconds_per_step(self) -> float:
        """Device seconds for a step, starts and evaluations' waits included; 0 before the first."""
        return self.device_seconds / self.steps if self.steps else 0.0

    def __add__(self, other: "Spent") -> "Spent":
        """Return both together."""
        return Spent(device_seconds=self.device_seconds + other.device_seconds, steps=self.steps + other.steps)


def read_spent(state: RunState) -> Spent:
    """Return what the ended attempts of a run have used."""
    ended = [(attempt.started, attempt.ended) for attempt in state.attempts if attempt.ended]
    steps = sum(max(0, end.last_step - started.first_step) for started, end in ended)
    return Spent(device_seconds=sum(end.gpu_seconds for _, end in ended), steps=steps)


def limit_problem(cost: CostConfig, spent: Spent, *, next_steps: int) -> str:
    """Return why the next segment, of so many steps, is not trained; empty if it may be.

    Before anything is known of a step's cost a segment is trained, so the limit is passed by one segment at most.
    """
    if cost.limit is None:
        return ""
    price, ahead = cost.gpu_hour_price or 0.0, spent.seconds_per_step * next_steps
    limit_seconds = 3600 * (cost.limit / price if price else cost.limit)
    if spent.device_seconds < limit_seconds and spent.device_seconds + ahead <= limit_seconds:
        return ""

    def words(device_seconds: float) -> str:
        hours = device_seconds / 3600
        return format_money(hours * price, cost.currency) if price else f"{hours:.4g} device hours"

    limit, used, more = map(words, (limit_seconds, spent.device_seconds, ahead))
    return f"cost.limit = {limit}: {used} spent, and the next {next_steps} steps would take {more}"
