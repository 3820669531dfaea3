"""The limits of what a run spends: retries by reason, and device hours or money. Pure functions of policy and log.

Nothing is stored here, because the log's receipts hold the charges. A commit of new steps refills a budget's retries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import floor

from cairn.storage.logs.run_entries import Decision, EvaluationFailed
from cairn.storage.logs.run_state import Charges, RunState
from cairn.tasks.configuration.settings import BudgetConfig, BudgetsConfig, CostConfig
from cairn.tasks.policy.attempt_sizes import AttemptSizes
from cairn.tasks.policy.failures import WAITS_FOR_A_PERSON, ErrorKind, Failure
from cairn.tasks.policy.termination import DecisionAction, TerminationReason
from cairn.tasks.text.format import format_list, format_money

_STOPPING = frozenset(
    {TerminationReason.FENCED, TerminationReason.CANCELLED, TerminationReason.PAUSED, TerminationReason.ERROR}
)
_UNCHARGED = {TerminationReason.COMPLETED: DecisionAction.FINISH} | dict.fromkeys(_STOPPING, DecisionAction.STOP)
_REPEATS_ARE_FUTILE = frozenset(
    {TerminationReason.OOM, TerminationReason.BAD_DATA, TerminationReason.DIVERGED, TerminationReason.HUNG}
)
"""Reasons in the run itself; a preemption or an unavailable store may happen twice at one step by chance."""
_TWICE_IS_FUTILE = frozenset({ErrorKind.MISSING, ErrorKind.DAMAGED, ErrorKind.REFUSED, ErrorKind.NOT_DURABLE})
"""The next claim verifies the checkpoint again; a second failure at the same step needs a person."""
_NEED_A_REMEDY = frozenset({TerminationReason.BAD_DATA, TerminationReason.DIVERGED})


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureImpact:
    """How far the failed attempt got, what it lost, and what its remedy changes.

    After out-of-memory the run goes on with `lighter` sizes, if there are any; the counts are those of the remedy.
    `given_up` means that a notice came before a trainer was given the attempt.
    """

    last_step: int
    sizes: AttemptSizes
    lighter: AttemptSizes | None = None
    wasted_gpu_seconds: float = 0.0
    quarantined_samples: int = 0
    repaired_objects: tuple[str, ...] = ()
    given_up: bool = False


Policy = Callable[[RunState, Failure, FailureImpact], Decision]
"""Decides what follows the end of the open attempt of a state."""


def decide(
    budgets: BudgetsConfig, state: RunState, failure: Failure, impact: FailureImpact, *, jitter: float = 0.0
) -> Decision:
    """Return what follows the end of the run's open attempt, whose receipt is not yet in `state`.

    `jitter` in [0, 1) shortens the delay by up to half, to spread runs that failed together.
    """
    if failure.reason in _UNCHARGED:
        return Decision(action=_UNCHARGED[failure.reason], reason=failure.detail)
    if impact.given_up:
        return Decision(action=DecisionAction.RESUME, reason=f"{failure.reason}: given up before it began")
    budget: BudgetConfig = getattr(budgets, failure.reason.replace("-", "_"))
    remedied, is_futile = _remedied(failure, impact), _is_futile(state, failure, impact.last_step)
    if not remedied.changed and failure.reason in _NEED_A_REMEDY:
        return _stop(f"{failure.reason}: no remedy is known, so a retry would fail the same way")
    if not remedied.changed and is_futile:
        again = f"the same failure at step {impact.last_step} with nothing changed since: no retry"
        return _stop(again, charged=failure.reason if failure.kind in _TWICE_IS_FUTILE else None)
    if failure.kind in WAITS_FOR_A_PERSON:
        return _stop(f"{failure.kind}: asking again cannot help; once that is mended, the same command continues")
    return _charged(budget, state, failure, impact, remedied, jitter)


def backoff_seconds(budget: BudgetConfig, retries: int) -> float:
    """Return how long to wait before the retry that follows `retries` others."""
    return budget.backoff_seconds * 2.0 ** min(retries, 6)


def evaluator_budget(budget: BudgetConfig, failed: Sequence[EvaluationFailed]) -> BudgetConfig:
    """Return the budget of each evaluation: its first try alone, once the run's failed ones have spent its limits."""
    retries = len(failed) - len({(item.manifest_sha256, item.suite_sha256) for item in failed})
    limits = ((budget.total, retries + 1), (budget.wasted_gpu_seconds, sum(item.seconds for item in failed)))
    is_spent = any(limit is not None and used > limit for limit, used in limits)
    return budget.model_copy(update={"retries": 0}) if is_spent else budget


def _stop(reason: str, *, charged: str | None = None) -> Decision:
    return Decision(action=DecisionAction.STOP, reason=reason, charged=charged)


def _remedied(failure: Failure, impact: FailureImpact) -> Decision:
    """Return the decision to resume with what the remedy changes, as yet without reason and charge."""
    resume = Decision(action=DecisionAction.RESUME, reason="")
    now, lighter = impact.sizes, impact.lighter
    if failure.reason is TerminationReason.OOM and lighter is not None:
        recomputes = lighter.activation_checkpointing and not now.activation_checkpointing
        is_smaller = lighter.micro_batch < now.micro_batch
        parts = ["activations are computed again"] if recomputes else []
        parts += [f"micro-batch {now.micro_batch} to {lighter.micro_batch}"] if is_smaller else []
        return replace(
            resume,
            changed=", ".join([*parts, "bits differ from here" if is_smaller else "bits stay equal"]),
            micro_batch=lighter.micro_batch if is_smaller else None,
            activation_checkpointing=recomputes or None,
        )
    if impact.repaired_objects:
        return replace(resume, changed=f"damaged {format_list(impact.repaired_objects, 3)} rebuilt from source")
    quarantined = impact.quarantined_samples
    return replace(resume, changed=f"{quarantined} sample(s) quarantined") if quarantined else resume


def _charged(
    budget: BudgetConfig, state: RunState, failure: Failure, impact: FailureImpact, remedied: Decision, jitter: float
) -> Decision:
    spent, reason = state.charges.get(failure.reason, Charges()), failure.reason
    retries, wasted = len(spent.since_progress), spent.wasted_gpu_seconds + impact.wasted_gpu_seconds
    samples = sum(len(item.windows) for item in state.quarantines if item.reason == reason)
    limits: dict[str, tuple[float | None, float]] = {
        "retries": (budget.retries, retries + 1),
        "total": (budget.total, spent.total + 1),
        "wasted_gpu_seconds": (budget.wasted_gpu_seconds, wasted),
        "samples": (budget.samples, samples + impact.quarantined_samples),
    }
    left = {name: None if limit is None else max(floor(limit - used), 0) for name, (limit, used) in limits.items()}
    empty = next((name for name, (limit, used) in limits.items() if limit is not None and used > limit), "")
    if empty:
        by = f" by attempts {', '.join(map(str, spent.since_progress))}" if retries else ""
        refill = f"a commit beyond step {state.high_water_step} refills it, or " if empty == "retries" else ""
        tried = f"{retries} retries since the last new commit{by}, {spent.total} in total"
        lost = f"{wasted:.0f} device seconds lost to it"
        why = f"budget {reason} is spent ({empty}): {tried}, {lost}; {refill}raise budgets.{reason}.{empty}"
        return Decision(action=DecisionAction.STOP, reason=why, charged=reason, left=left)
    changed = f", {remedied.changed}" if remedied.changed else ""
    return replace(
        remedied,
        reason=f"{reason}: resume from the newest committed checkpoint{changed}",
        charged=reason,
        left=left,
        delay_seconds=backoff_seconds(budget, retries) * (1 - jitter / 2),
    )


def _is_futile(state: RunState, failure: Failure, last_step: int) -> bool:
    """Whether the same failure ended an attempt at the same step before, and no attempt got further since."""
    if failure.reason not in _REPEATS_ARE_FUTILE and failure.kind not in _TWICE_IS_FUTILE:
        return False
    for attempt in islice(reversed(state.attempts), 1, None):
        before = attempt.ended
        if before is None or before.last_step > last_step:
            return False
        if before.fingerprint == failure.fingerprint and before.last_step == last_step:
            return True
    return False


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
