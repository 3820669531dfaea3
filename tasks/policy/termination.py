"""How attempts and flows can end: reasons, decisions, exit codes, Prefect states, and the table that connects them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class TerminationReason(StrEnum):
    """Why an attempt ended, as the receipt stores it."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    LOST = "lost"
    OOM = "oom"
    BAD_DATA = "bad-data"
    DIVERGED = "diverged"
    STORAGE = "storage"
    HUNG = "hung"
    FENCED = "fenced"
    CANCELLED = "cancelled"
    ERROR = "error"


class DecisionAction(StrEnum):
    """What follows the end of an attempt, as the receipt stores it."""

    RESUME = "resume"
    STOP = "stop"
    FINISH = "finish"


class ExitCode(IntEnum):
    """The command's exit codes; 75 is EX_TEMPFAIL of sysexits.h, 130 is the shell's number for Ctrl-C."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    GATE_REFUSED = 3
    BUDGET_EXHAUSTED = 4
    INTEGRITY = 5
    CONFIG_DRIFT = 6
    LIVE_OWNER = 7
    PREEMPTED = 75
    INTERRUPTED = 130


class FlowState(StrEnum):
    """The final states of the flow `train-gpt`, by the names that Prefect shows."""

    COMPLETED = "Completed"
    PREEMPTED = "Preempted"
    INTERRUPTED = "Interrupted"
    CANCELLING = "Cancelling"
    CANCELLED = "Cancelled"
    BUDGET_EXHAUSTED = "BudgetExhausted"
    STORAGE = "Storage"
    FENCED = "Fenced"
    ERROR = "Error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Termination:
    """What one termination reason means.

    `task_state` names the failed segment in Prefect; `flow_state` is the flow's final state when no other attempt
    follows. `summary` completes a sentence about the attempt; `because` says why the evidence leads to this reason.
    """

    task_state: str
    summary: str
    because: str = ""
    flow_state: FlowState = FlowState.BUDGET_EXHAUSTED


TERMINATIONS: Mapping[str, Termination] = {
    TerminationReason.COMPLETED: Termination(
        task_state="Completed", flow_state=FlowState.COMPLETED, summary="finished the run {at}"
    ),
    TerminationReason.PREEMPTED: Termination(
        task_state="Preempted",
        flow_state=FlowState.PREEMPTED,
        summary="was preempted {at}: its machine was about to be taken away",
        because="a shutdown notice came from the machine, so the run itself is not the cause",
    ),
    TerminationReason.LOST: Termination(
        task_state="Lost",
        summary="disappeared {at} without an error",
        because="no notice, no error and no memory kill is on record, so the cause is unknown",
    ),
    TerminationReason.OOM: Termination(
        task_state="OOM",
        summary="ran out of memory {at}",
        because="an allocation failed, or the kernel killed the process for memory",
    ),
    TerminationReason.BAD_DATA: Termination(
        task_state="BadData",
        summary="met data that cannot be trained on {at}",
        because="the failure was traced to the samples of one batch or to a damaged file",
    ),
    TerminationReason.DIVERGED: Termination(
        task_state="Diverged",
        summary="was ended {at} because its loss exploded",
        because="the loss was not finite or far above its own history, and no single batch explains it",
    ),
    TerminationReason.STORAGE: Termination(
        task_state="Storage",
        summary="could not reach or write its storage {at}",
        because="an error of the store ended it",
    ),
    TerminationReason.HUNG: Termination(
        task_state="Hung",
        summary="stopped making progress {at} and was killed",
        because="it was silent for longer than the watchdog's timeout, which is computed from the run's own steps",
    ),
    TerminationReason.FENCED: Termination(
        task_state="Fenced",
        flow_state=FlowState.FENCED,
        summary="gave way {at} to a newer attempt that had taken over the run",
    ),
    TerminationReason.CANCELLED: Termination(
        task_state="Cancelled", flow_state=FlowState.INTERRUPTED, summary="was cancelled by a person {at}"
    ),
    TerminationReason.ERROR: Termination(
        task_state="Error",
        flow_state=FlowState.ERROR,
        summary="failed {at} with an error that a retry would not fix",
        because="it matches none of the causes that a retry can fix",
    ),
}
"""Keyed by the stored word, which a newer version may extend."""

EXIT_CODES: Mapping[str, ExitCode] = {
    FlowState.COMPLETED: ExitCode.DONE,
    FlowState.PREEMPTED: ExitCode.PREEMPTED,
    FlowState.INTERRUPTED: ExitCode.INTERRUPTED,
    FlowState.CANCELLING: ExitCode.INTERRUPTED,
    FlowState.CANCELLED: ExitCode.INTERRUPTED,
    FlowState.BUDGET_EXHAUSTED: ExitCode.BUDGET_EXHAUSTED,
    FlowState.STORAGE: ExitCode.PREEMPTED,
    FlowState.FENCED: ExitCode.LIVE_OWNER,
    FlowState.ERROR: ExitCode.ERROR,
}
"""Prefect's own states, such as `Failed` and `Crashed`, have no code here."""

RESTARTABLE: frozenset[str] = frozenset({TerminationReason.PREEMPTED, TerminationReason.CANCELLED})
"""After these the flow ends whatever was decided, and the same command continues the run later."""


def final_state(reason: str, action: str, charged: str | None) -> FlowState | None:
    """Return the flow's final state after an attempt that ended for `reason`, or None if the flow starts another.

    A store that refuses charges no budget: the same command continues once it allows the operation.
    """
    if action == DecisionAction.RESUME and reason not in RESTARTABLE:
        return None
    if reason == TerminationReason.STORAGE and charged is None:
        return FlowState.STORAGE
    return TERMINATIONS[reason].flow_state if reason in TERMINATIONS else FlowState.BUDGET_EXHAUSTED
