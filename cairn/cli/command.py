"""The `cairn` command: registers its subcommands, prints errors for people, and exits with the contract's codes."""

import os
import stat
import sys
from collections.abc import Sequence

from cyclopts import CycloptsError

from cairn.cli.app import MORE, app, examples_text, help_groups
from cairn.cli.configuration_commands import CONFIGURATION_COMMANDS
from cairn.cli.data_commands import DATA_COMMANDS
from cairn.cli.machine_commands import MACHINE_COMMANDS
from cairn.cli.model_commands import MODEL_COMMANDS
from cairn.cli.run_commands import RUN_COMMANDS
from cairn.cli.train_commands import TRAIN_COMMANDS
from flows.errors import EXPECTED_ERRORS
from model.errors import InvalidInput
from reports.errors import InvalidQuery, RunNotFound
from storage.errors import Fenced, IntegrityError, StorageError, StoreUnsound
from tasks.attempt.shutdown_signal import exit_on_sigterm
from tasks.data.document import InvalidCorpus
from tasks.errors import BudgetExhausted, ConfigDrift, GateRefused, InvalidConfiguration, LiveOwner
from tasks.policy.termination import ExitCode
from tasks.text.output import discard_stdout, say

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

_PLACES = {name: (group, place) for group, names in help_groups() for place, name in enumerate(names)}
for function in (
    *TRAIN_COMMANDS,
    *RUN_COMMANDS,
    *MODEL_COMMANDS,
    *DATA_COMMANDS,
    *CONFIGURATION_COMMANDS,
    *MACHINE_COMMANDS,
):
    name = function.__name__.replace("_", "-")
    group, place = _PLACES.get(name, (MORE, 0))
    app.command(function, name=name, group=group, sort_key=place, help_epilogue=examples_text(name))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    os.umask(os.umask(0o777) | stat.S_IWOTH)  # whatever the umask allows, nothing is ever writable for everybody
    # With a stream closed, as by `>&-`, Python has None in its place.
    nowhere = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    code = run_command(sys.argv[1:] if arguments is None else arguments)
    exit_on_sigterm(code)
    sys.exit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and print its errors for people; returns the exit code."""
    try:
        returned = app(list(arguments), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        say(f"cairn: {_describe_usage_error(error)}")
        return ExitCode.USAGE
    except BrokenPipeError:  # the reader of a pipe has seen enough
        discard_stdout()
        return ExitCode.DONE
    except (KeyboardInterrupt, Exception) as error:
        _print_error(error)
        return code_of_error(error)
    code = returned if isinstance(returned, int) else ExitCode.DONE
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the command is done, whether or not its output is read
        discard_stdout()
    except OSError as error:
        discard_stdout()
        say(f"cairn: the output could not be written: {error}")
        return code or ExitCode.ERROR
    return code


def code_of_error(error: BaseException) -> ExitCode:
    """Return the exit code for an error that ended the command; an unexpected one is an ERROR."""
    if type(error) is StorageError:  # the root itself is only raised for a name or URL that cannot be used
        return ExitCode.USAGE
    return next((code for kind, code in _ERRORS if isinstance(error, kind)), ExitCode.ERROR)


def _describe_usage_error(error: CycloptsError) -> str:
    problem = " ".join(str(error).partition(" Available commands:")[0].split()).removesuffix(".")
    name = error.command_chain[0] if error.command_chain else ""
    where = f"`cairn {name} --help` shows how it is used" if name else "`cairn --help` lists the commands"
    return f"{problem} {where}" if problem.endswith("?") else f"{problem}; {where}"


def _print_error(error: BaseException) -> None:
    is_expected = isinstance(error, (*EXPECTED_ERRORS, KeyboardInterrupt))
    if not is_expected or os.environ.get("CAIRN_DEBUG"):
        import traceback

        say("".join(traceback.format_exception(error)).rstrip("\n"))
    if isinstance(error, KeyboardInterrupt):
        say("interrupted; the same command continues")
    elif is_expected:
        say(f"cairn: {error}")


if __name__ == "__main__":
    main()
