"""With which number the command leaves: one pure table from states and errors, as CONTRACT promises them.

Owns the meaning of each number. Refuses to print, to import the orchestrator, and to decide anything.
"""

from enum import IntEnum

from flows.errors import ConfigDrift, FlowError, InvalidConfiguration, InvalidQuery, RunNotFound
from model.errors import InvalidInput, ModelError
from storage.errors import Fenced, IntegrityError, StorageError, StoreUnsound
from tasks.data.document import InvalidCorpus
from tasks.errors import BudgetExhausted, GateRefused, LiveOwner, TaskError


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


EXPECTED_ERRORS = (FlowError, StorageError, TaskError, ModelError)
"""Errors whose message is written for people: one line says it all, a traceback would only hide it."""

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
_ERRORS: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (InvalidConfiguration, ExitCode.USAGE),
    (RunNotFound, ExitCode.USAGE),
    (InvalidQuery, ExitCode.USAGE),
    (InvalidCorpus, ExitCode.USAGE),
    (InvalidInput, ExitCode.USAGE),
    (StoreUnsound, ExitCode.USAGE),
    (GateRefused, ExitCode.GATE_REFUSED),
    (BudgetExhausted, ExitCode.BUDGET_EXHAUSTED),
    (IntegrityError, ExitCode.INTEGRITY),
    (ConfigDrift, ExitCode.CONFIG_DRIFT),
    (LiveOwner, ExitCode.LIVE_OWNER),
    (Fenced, ExitCode.LIVE_OWNER),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)


def code_of_state(name: str) -> ExitCode | None:
    """Return the code of a final flow state this project names itself, or None for the orchestrator's own names."""
    return _STATES.get(name)


def code_of_error(error: BaseException) -> ExitCode:
    """Return the code for an error that ended the command; what nobody foresaw is an ERROR."""
    if type(error) is StorageError:  # the root itself is only raised for a name or URL that cannot be used
        return ExitCode.USAGE
    return next((code for kind, code in _ERRORS if isinstance(error, kind)), ExitCode.ERROR)
