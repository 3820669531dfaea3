"""With which number the command leaves: one pure table from states and errors, as CONTRACT promises them.

Owns the meaning of each number. Refuses to print, to import the orchestrator, and to decide anything.
"""

from model.errors import InvalidInput
from reports.errors import InvalidQuery, RunNotFound
from storage.errors import Fenced, IntegrityError, StorageError, StoreUnsound
from tasks.data.document import InvalidCorpus
from tasks.errors import BudgetExhausted, ConfigDrift, GateRefused, InvalidConfiguration, LiveOwner
from tasks.policy.termination import ExitCode

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


def code_of_error(error: BaseException) -> ExitCode:
    """Return the code for an error that ended the command; what nobody foresaw is an ERROR."""
    if type(error) is StorageError:  # the root itself is only raised for a name or URL that cannot be used
        return ExitCode.USAGE
    return next((code for kind, code in _ERRORS if isinstance(error, kind)), ExitCode.ERROR)
