"""How attempts and flows can end: reasons, decisions, exit codes, outcomes, and the table that connects them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache
from pathlib import Path

import msgspec


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
    """The words for a reason: `summary` completes a sentence about the attempt, `because` says why it is this one."""

    summary: str
    because: str = ""


@cache
def read_terminations() -> Mapping[str, Termination]:
    """Return the words for each reason by its stored word, which a newer version may extend."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Termination])


_OUTCOMES: Mapping[str, FlowOutcome] = {
    TerminationReason.COMPLETED: FlowOutcome.COMPLETED,
    TerminationReason.PREEMPTED: FlowOutcome.PREEMPTED,
    TerminationReason.FENCED: FlowOutcome.FENCED,
    TerminationReason.CANCELLED: FlowOutcome.INTERRUPTED,
    TerminationReason.PAUSED: FlowOutcome.COMPLETED,
    TerminationReason.ERROR: FlowOutcome.ERROR,
}
"""How the flow ends after an attempt that no other follows; after any other reason its budget is exhausted."""

GIVEN_UP = frozenset[str](TerminationReason) - _OUTCOMES.keys()
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
    outcome = _OUTCOMES.get(reason, FlowOutcome.BUDGET_EXHAUSTED)
    return reason if outcome == FlowOutcome.BUDGET_EXHAUSTED and not is_spent else outcome
