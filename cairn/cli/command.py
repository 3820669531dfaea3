"""The `cairn` command: its verbs gathered, its errors explained, its exit code.

Owns how a command line ends. The verbs live in `reading_verbs`, `acting_verbs` and
`model_verbs`, and import what they need when they run. Refuses to know how anything is done.
"""

import os
import sys
import traceback
from collections.abc import Sequence

from cyclopts import CycloptsError

from cairn.cli.acting_verbs import ACTING_VERBS
from cairn.cli.app import app
from cairn.cli.completion import completion
from cairn.cli.exit_code import code_of_error
from cairn.cli.file_permissions import forbid_writing_by_everybody
from cairn.cli.model_verbs import MODEL_VERBS
from cairn.cli.reading_verbs import READING_VERBS
from cairn.cli.verb_help import MORE, examples_text, help_groups
from flows.errors import EXPECTED_ERRORS
from tasks.attempt.exit_on_sigterm import exit_on_sigterm
from tasks.policy.termination import ExitCode
from tasks.text.output import forget_stdout, say

_PLACES = {verb: (group, place) for group, verbs in help_groups() for place, verb in enumerate(verbs)}
for function in (*READING_VERBS, *ACTING_VERBS, *MODEL_VERBS, completion):
    name = function.__name__.replace("_", "-")
    group, place = _PLACES.get(name, (MORE, 0))
    app.command(function, name=name, group=group, sort_key=place, help_epilogue=examples_text(name))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    forbid_writing_by_everybody()
    # Started with a stream closed, as `>&-` does, Python has none at all: what would be said goes nowhere.
    nowhere = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    code = run_command(sys.argv[1:] if arguments is None else arguments)
    exit_on_sigterm(code)
    sys.exit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code and prints errors as a person wants to read them."""
    try:
        returned = app(list(arguments), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        say(f"cairn: {_refusal(error)}")
        return ExitCode.USAGE
    except BrokenPipeError:  # the reader of a pipe has seen enough
        forget_stdout()
        return ExitCode.DONE
    except (KeyboardInterrupt, Exception) as error:
        return _explained(error)
    code = returned if isinstance(returned, int) else ExitCode.DONE
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # what was done is done, and ended as it ended, whether or not anybody reads of it
        forget_stdout()
    except OSError as error:
        forget_stdout()
        say(f"cairn: the output could not be written: {error}")
        return code or ExitCode.ERROR
    return code


def _refusal(error: CycloptsError) -> str:
    """One line: what is wrong with the command line, and where its use is shown."""
    problem = " ".join(str(error).partition(" Available commands:")[0].split()).removesuffix(".")
    verb = error.command_chain[0] if error.command_chain else ""
    where = f"`cairn {verb} --help` shows how it is used" if verb else "`cairn --help` lists the verbs"
    return f"{problem} {where}" if problem.endswith("?") else f"{problem}; {where}"


def _explained(error: BaseException) -> ExitCode:
    expected = isinstance(error, (*EXPECTED_ERRORS, KeyboardInterrupt))
    if not expected or os.environ.get("CAIRN_DEBUG"):
        say("".join(traceback.format_exception(error)).rstrip("\n"))
    if isinstance(error, KeyboardInterrupt):
        say("interrupted; the same command continues")
    elif expected:
        say(f"cairn: {error}")
    return code_of_error(error)


if __name__ == "__main__":
    main()
