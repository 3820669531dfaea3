"""What a failure may cost and what is done next: a pure function of policy, log and failure.

Owns "progress refills" and "no news, no retry". Nothing here is stored: what was spent is counted in the log's own
receipts. Refuses to know clocks, stores and the orchestrator.
"""

from dataclasses import dataclass

from storage.run_entries import AttemptEnded, Decision
from storage.run_state import AttemptRecord, RunState
from tasks.failures import Failure, TerminationReason
from tasks.settings import BudgetConfig, BudgetsConfig

RESUME = "resume"
STOP = "stop"
FINISH = "finish"
_UNCHARGED = {
    TerminationReason.COMPLETED: FINISH,
    TerminationReason.FENCED: STOP,
    TerminationReason.CANCELLED: STOP,
    TerminationReason.ERROR: STOP,
}
_SAME_AGAIN_IS_NO_NEWS = frozenset(
    {TerminationReason.OOM, TerminationReason.BAD_DATA, TerminationReason.DIVERGED, TerminationReason.HUNG}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spending:
    """How often a reason was charged since the last progress and in all."""

    since_progress: int
    total: int


def budget_of(budgets: BudgetsConfig, reason: str) -> BudgetConfig | None:
    """Return the budget that pays for `reason`, or None where nothing does."""
    budget: BudgetConfig | None = getattr(budgets, reason.replace("-", "_"), None)
    return budget


def spending(attempts: tuple[AttemptRecord, ...], reason: str) -> Spending:
    """Count the charges of `reason` in ended attempts; one that committed new steps refilled before it was charged."""
    since = total = 0
    for attempt in attempts:
        if attempt.made_progress:
            since = 0
        if attempt.ended is not None and attempt.ended.decision.charged == reason:
            since += 1
            total += 1
    return Spending(since_progress=since, total=total)


def decide(budgets: BudgetsConfig, state: RunState, failure: Failure, *, last_step: int, micro_batch: int) -> Decision:
    """Return what follows the end of the run's open attempt, whose receipt is not yet in `state`."""
    if failure.reason in _UNCHARGED:
        return Decision(action=_UNCHARGED[failure.reason], reason=failure.detail)
    budget = budget_of(budgets, failure.reason)
    if budget is None:
        return Decision(action=STOP, reason=f"no budget pays for {failure.reason}")
    smaller = micro_batch // 2 if failure.reason is TerminationReason.OOM and micro_batch > 1 else None
    if smaller is None and _is_no_news(state, failure, last_step):
        return Decision(
            action=STOP, reason=f"the same failure at step {last_step} with nothing changed since: no retry"
        )
    return _charged(budget, state, failure, micro_batch=smaller)


def _charged(budget: BudgetConfig, state: RunState, failure: Failure, *, micro_batch: int | None) -> Decision:
    spent = spending(state.attempts, failure.reason)
    left = budget.retries - spent.since_progress - 1
    left_total = None if budget.total is None else budget.total - spent.total - 1
    shown = {"retries": max(left, 0), "total": None if left_total is None else max(left_total, 0)}
    if left < 0 or (left_total is not None and left_total < 0):
        why = f"budget {failure.reason} is spent: {spent.since_progress} since the last commit, {spent.total} in all"
        unblock = (
            f"; a commit beyond step {state.high_water_step} refills it, or raise budgets.{failure.reason}.retries"
        )
        return Decision(action=STOP, reason=why + unblock, charged=failure.reason, left=shown)
    changed = f", micro-batch now {micro_batch}" if micro_batch else ""
    return Decision(
        action=RESUME,
        reason=f"{failure.reason}: resume from the newest committed checkpoint{changed}",
        charged=failure.reason,
        left=shown,
        delay_seconds=budget.backoff_seconds * 2 ** min(spent.since_progress, 6),
        micro_batch=micro_batch,
    )


def _is_no_news(state: RunState, failure: Failure, last_step: int) -> bool:
    if failure.reason not in _SAME_AGAIN_IS_NO_NEWS or len(state.attempts) < 2:
        return False
    before: AttemptEnded | None = state.attempts[-2].ended
    return before is not None and before.fingerprint == failure.fingerprint and before.last_step == last_step
