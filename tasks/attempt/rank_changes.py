"""The entry about ranks that were lost or joined, and whether their attempt may go on."""

from cairn.storage.logs import run_log, run_state
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.run_members import MembersChanged
from cairn.tasks.configuration.settings import BudgetsConfig
from cairn.tasks.policy import budgets
from cairn.tasks.policy.attempt_sizes import sizes_of
from cairn.tasks.policy.failures import Failure
from cairn.tasks.policy.termination import DecisionAction, TerminationReason


def record_members(log: run_log.RunLog, change: MembersChanged, limits: BudgetsConfig, writer: Writer) -> bool:
    """Append the change, a loss charged as an attempt's end would be; return False if the budget does not allow it.

    Then nothing is appended: the attempt has to end, and its receipt is charged.
    """
    failure = Failure(reason=TerminationReason.LOST, detail=change.detail, fingerprint="rank")

    def decide(state: run_state.RunState) -> MembersChanged | None:
        owner = state.open_attempt
        if owner is None or owner.started.attempt != change.attempt or change in state.member_changes:
            return None
        if not change.charged:
            return change
        impact = budgets.FailureImpact(last_step=change.step, sizes=sizes_of(owner.started))
        decision = budgets.decide(limits, state, failure, impact)
        return change if decision.action == DecisionAction.RESUME else None

    return change in log.append(decide, writer=writer).member_changes
