"""Exit codes of the command and the flow states they belong to, as CONTRACT promises them."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a script may rely on; 75 is EX_TEMPFAIL of sysexits.h, 130 is the shell's number for Ctrl-C."""

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


_STATES = {
    "Completed": ExitCode.DONE,
    "Preempted": ExitCode.PREEMPTED,
    "Interrupted": ExitCode.INTERRUPTED,
    "Cancelling": ExitCode.INTERRUPTED,
    "Cancelled": ExitCode.INTERRUPTED,
    "BudgetExhausted": ExitCode.BUDGET_EXHAUSTED,
    "Fenced": ExitCode.LIVE_OWNER,
    "Error": ExitCode.ERROR,
}


def code_of_state(name: str) -> ExitCode | None:
    """Return the code of a final flow state this project names itself, or None for the orchestrator's own names."""
    return _STATES.get(name)
