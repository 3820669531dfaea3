"""How attempts and flows can end: reasons, decisions, exit codes, outcomes, and the table that connects them."""

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
    TOO_FEW_MACHINES = "too-few-machines"
    FENCED = "fenced"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    ERROR = "error"

    @property
    def state_name(self) -> str:
        """The name of a failed segment's state in Prefect, such as `BadData`."""
        return "OOM" if self is TerminationReason.OOM else self.title().replace("-", "")


class DecisionAction(StrEnum):
    """The step after the end of an attempt, as the receipt stores it."""

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


class FlowOutcome(StrEnum):
    """How the flow `train-gpt` can end, by the word that stands first in Prefect's message."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    BUDGET_EXHAUSTED = "budget-exhausted"
    STORAGE = "storage"
    FENCED = "fenced"
    TRAINED_ELSEWHERE = "trained-elsewhere"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowEnd:
    """How a flow ended, in one line for people; the reason is a `FlowOutcome`, or a refusal's own."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Termination:
    """The meaning of one termination reason.

    `outcome` is how the flow ends when no other attempt follows. `summary` completes a sentence about the attempt;
    `because` says why the evidence leads to this reason.
    """

    summary: str
    because: str = ""
    outcome: FlowOutcome = FlowOutcome.BUDGET_EXHAUSTED


TERMINATIONS: Mapping[str, Termination] = {
    TerminationReason.COMPLETED: Termination(outcome=FlowOutcome.COMPLETED, summary="finished the run {at}"),
    TerminationReason.PREEMPTED: Termination(
        outcome=FlowOutcome.PREEMPTED,
        summary="was preempted {at}: its machine was about to be taken away",
        because="a shutdown notice came from the machine, so the run itself is not the cause",
    ),
    TerminationReason.LOST: Termination(
        summary="disappeared {at} without an error",
        because="no notice, no error and no memory kill is on record, so the cause is unknown",
    ),
    TerminationReason.OOM: Termination(
        summary="ran out of memory {at}", because="an allocation failed, or the kernel killed the process for memory"
    ),
    TerminationReason.BAD_DATA: Termination(
        summary="met data that cannot be trained on {at}",
        because="the failure was traced to the samples of one batch or to a damaged file",
    ),
    TerminationReason.DIVERGED: Termination(
        summary="was ended {at} because its loss exploded",
        because="the loss was not finite or far above its own history, and no single batch explains it",
    ),
    TerminationReason.STORAGE: Termination(
        summary="could not reach or write its storage {at}", because="an error of the store ended it"
    ),
    TerminationReason.HUNG: Termination(
        summary="stopped making progress {at} and was killed",
        because="it was silent for longer than the watchdog's timeout, which is computed from the run's own steps",
    ),
    TerminationReason.TOO_FEW_MACHINES: Termination(
        summary="waited for other machines in vain {at}",
        because="the first machine was here, and too few others came in time",
    ),
    TerminationReason.FENCED: Termination(
        outcome=FlowOutcome.FENCED, summary="gave way {at} to a newer attempt that had taken over the run"
    ),
    TerminationReason.CANCELLED: Termination(outcome=FlowOutcome.INTERRUPTED, summary="was cancelled by a person {at}"),
    TerminationReason.PAUSED: Termination(outcome=FlowOutcome.COMPLETED, summary="was paused {at} by a limit"),
    TerminationReason.ERROR: Termination(
        outcome=FlowOutcome.ERROR,
        summary="failed {at} with an error that a retry would not fix",
        because="it matches none of the causes that a retry can fix",
    ),
}
"""Keyed by the stored word, which a newer version may extend."""

GIVEN_UP: frozenset[str] = frozenset(
    reason for reason, termination in TERMINATIONS.items() if termination.outcome == FlowOutcome.BUDGET_EXHAUSTED
)
"""The reasons by which a flow ends as well, where no retry could help."""

EXIT_CODES: Mapping[str, ExitCode] = {
    **dict.fromkeys(GIVEN_UP, ExitCode.BUDGET_EXHAUSTED),
    FlowOutcome.COMPLETED: ExitCode.DONE,
    FlowOutcome.PREEMPTED: ExitCode.PREEMPTED,
    FlowOutcome.INTERRUPTED: ExitCode.INTERRUPTED,
    FlowOutcome.CANCELLED: ExitCode.INTERRUPTED,
    FlowOutcome.PAUSED: ExitCode.INTERRUPTED,
    FlowOutcome.BUDGET_EXHAUSTED: ExitCode.BUDGET_EXHAUSTED,
    FlowOutcome.STORAGE: ExitCode.PREEMPTED,
    FlowOutcome.FENCED: ExitCode.LIVE_OWNER,
    FlowOutcome.TRAINED_ELSEWHERE: ExitCode.LIVE_OWNER,
    FlowOutcome.ERROR: ExitCode.ERROR,
}
RESTARTABLE = frozenset[str]({TerminationReason.PREEMPTED, TerminationReason.CANCELLED, TerminationReason.PAUSED})
"""After these the flow ends whatever was decided, and the same command continues the run later."""


def flow_outcome(reason: str, action: str, charged: str | None, *, is_spent: bool = True) -> str | None:
    """Return how the flow ends after an attempt that ended for `reason`, or None if the flow starts another.

    A store that refuses charges no budget: the same command continues once it allows the operation. Where no retry
    could help though the budget is not spent, the flow ends by the attempt's own reason.
    """
    if action == DecisionAction.RESUME and reason not in RESTARTABLE:
        return FlowOutcome.PREEMPTED if reason == TerminationReason.TOO_FEW_MACHINES else None
    if reason == TerminationReason.STORAGE and charged is None:
        return FlowOutcome.STORAGE
    outcome = TERMINATIONS[reason].outcome if reason in TERMINATIONS else FlowOutcome.BUDGET_EXHAUSTED
    return reason if outcome == FlowOutcome.BUDGET_EXHAUSTED and not is_spent else outcome
