"""The `cairn` command: its verbs gathered, its errors explained, its exit code.

Owns how a command line ends. The verbs live in `reading_verbs` and `acting_verbs`, and import what they need when they
run. Refuses to know how anything is done.
"""

import os
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from flows.acting_verbs import ACTING_VERBS
from flows.exit_code import EXPECTED_ERRORS, ExitCode, code_of_error
from flows.output import say
from flows.reading_verbs import READING_VERBS


def _version() -> str:
    from importlib.metadata import version

    return f"cairn {version('cairn')}"


app = App(
    name="cairn",
    help="Trains GPTs on machines that will be taken away, and leaves tracks.",
    version=_version,
    help_format="plaintext",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(show_default=False),
)
for verb in (*READING_VERBS, *ACTING_VERBS):
    app.command(verb)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run_command(sys.argv[1:] if arguments is None else arguments))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code and prints errors as a person wants to read them."""
    try:
        code = app(list(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        say(f"cairn: {error}\nsee `cairn --help` or `cairn VERB --help`")
        return ExitCode.USAGE
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except (KeyboardInterrupt, Exception) as error:
        return _explained(error)
    return code if isinstance(code, int) else ExitCode.DONE


def _explained(error: BaseException) -> ExitCode:
    expected = isinstance(error, (*EXPECTED_ERRORS, KeyboardInterrupt))
    if not expected or os.environ.get("CAIRN_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        say("interrupted; the same command continues")
    elif expected:
        say(f"cairn: {error}")
    return code_of_error(error)


if __name__ == "__main__":
    main()
