"""The `cairn` command: registers its subcommands, prints errors for people, and exits with the contract's codes."""

import atexit
import contextlib
import os
import re
import stat
import sys
import traceback
from collections.abc import Mapping, Sequence

from cyclopts import CycloptsError, Group

from cairn.cli.app import app, describe_fields, read_examples
from cairn.flows.errors import EXPECTED_ERRORS
from cairn.model.errors import InvalidInput
from cairn.reports.errors import InvalidQuery, RunNotFound
from cairn.storage import errors
from cairn.storage.stores.child_process import THREAD_LIMITS, hide_memory
from cairn.tasks.attempt.shutdown_signal import exit_on_notice, expect_notices
from cairn.tasks.configuration.addresses import name_store
from cairn.tasks.errors import BudgetExhausted, ConfigDrift, GateRefused, InvalidConfiguration, LiveOwner
from cairn.tasks.policy.termination import ExitCode
from cairn.tasks.text.output import discard_output, escape_unencodable_output, guard_log, say

_STDERR = 2
_ERRNO = re.compile(r"\[Errno -?\d+\] ")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_UNUSABLE = (InvalidConfiguration, RunNotFound, InvalidQuery, InvalidInput)
_WRONG_STORE = (errors.StoreRefused, errors.StoreUnsound, errors.WriterTooOld)
_ERRORS: tuple[tuple[tuple[type[BaseException], ...], ExitCode], ...] = (
    ((*_UNUSABLE, *_WRONG_STORE), ExitCode.USAGE),
    ((GateRefused,), ExitCode.GATE_REFUSED),
    ((BudgetExhausted,), ExitCode.BUDGET_EXHAUSTED),
    ((errors.IntegrityError,), ExitCode.INTEGRITY),
    ((errors.StoreFull,), ExitCode.PREEMPTED),
    ((ConfigDrift,), ExitCode.CONFIG_DRIFT),
    ((LiveOwner, errors.Fenced), ExitCode.LIVE_OWNER),
    ((KeyboardInterrupt,), ExitCode.INTERRUPTED),
)

_GROUPS: Mapping[str, Mapping[str, str]] = {
    "Train": {"train": "train", "init": "store", "fork": "train", "config": "store", "watch": "train"},
    "Read runs": dict.fromkeys(
        ("runs", "status", "explain", "report", "attempts", "checkpoints", "evaluations", "log"), "run"
    )
    | {"note": "store"},
    "Curves and questions": {"ui": "store"} | dict.fromkeys(("plot", "compare", "diagnose", "sql", "simulate"), "run"),
    "Models": dict.fromkeys(("models", "sample", "evaluate", "promote", "rollback", "export"), "model"),
    "Data": dict.fromkeys(("data", "import-tokens", "export-tokens"), "model"),
    "Store and machine": dict.fromkeys(("verify", "replay", "sweep", "delete", "doctor", "completion"), "store"),
}
"""The verbs as `cairn --help` groups them, each with the file of its function, which is imported when it is needed."""
for place, (title, verbs) in enumerate(_GROUPS.items()):
    group = Group(title, sort_key=place)
    for order, (verb, file) in enumerate(verbs.items()):
        function = f"cairn.cli.{file}_commands:{verb.replace('-', '_')}"
        app.command(function, name=verb, group=group, sort_key=order)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    hide_memory()
    os.umask(os.umask(0o777) | stat.S_IWOTH)  # whatever the umask allows, nothing is ever writable for everybody
    # With a stream closed, as by `>&-`, Python has None in its place, and a pipe to a child could get its number.
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is None or sys.stderr is None:
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for as long as the process lives)
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    escape_unencodable_output()
    guard_log(os.environ)
    for name in (*THREAD_LIMITS, "RUST_BACKTRACE"):  # a panic of a library is told in one line
        os.environ.pop(name, None)
    codes = list[int]()
    atexit.register(_leave, codes)  # the first to be registered is the last to be called
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["train"]:
        expect_notices()
    code = run_command(words)
    codes.append(code)
    exit_on_notice(code)
    sys.exit(code)


def _leave(codes: list[int]) -> None:
    """Leave with the code, if it is known, before the interpreter is taken down.

    After that a SIGTERM would have no handler, and a library's thread still at work in C++ would abort the process.
    """
    if codes:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(codes[-1])


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and print its errors for people; returns the exit code."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if broken := next(filter(_SURROGATE.search, arguments), None):
        say(f"cairn: {broken!a}: must be UTF-8, as all that stores and documents hold; name it otherwise")
        return ExitCode.USAGE
    verb = arguments[0] if arguments else ""
    if verb in app and not {"--help", "-h"}.isdisjoint(arguments[1:]):
        examples = (f"  {line}" for line in read_examples(verb))
        app[verb].help_epilogue = "\n".join([describe_fields(verb), "", "Examples:", *examples])
    try:
        returned = app(list(arguments), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        from cairn.cli.usage_errors import describe_usage_error

        say(f"cairn: {describe_usage_error(error, arguments)}")
        return ExitCode.USAGE
    except (BrokenPipeError, SystemExit):  # the reader of a pipe has seen enough; of a help, rich says so by SystemExit
        discard_output(sys.stdout)
        return ExitCode.DONE
    except (KeyboardInterrupt, Exception) as error:
        _explain(error, arguments)
        return code_of_error(error)
    code = returned if isinstance(returned, int) else ExitCode.DONE
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the command is done, whether or not its output is read
        discard_output(sys.stdout)
    except OSError as error:
        discard_output(sys.stdout)
        say(f"cairn: the output could not be written: {error.strerror}")
        return code or ExitCode.ERROR
    return code


def _explain(error: BaseException, arguments: Sequence[str]) -> None:
    """Print what ended the command: one line where that says everything, else the traceback."""
    is_expected = isinstance(error, (*EXPECTED_ERRORS, KeyboardInterrupt, OSError))
    if not is_expected or os.environ.get("CAIRN_DEBUG"):
        say("".join(traceback.format_exception(error)).rstrip("\n"))
    if is_expected:
        hint = "; CAIRN_DEBUG=1 says where" if isinstance(error, OSError) else ""
        problem = f"cairn: {_ERRNO.sub('', str(error))}{hint}"
        words = "interrupted; the same command continues" if isinstance(error, KeyboardInterrupt) else problem
        say(name_store(words, _store_of(arguments), os.environ))


def _store_of(arguments: Sequence[str]) -> str:
    """Return the store that a command line names, or nothing."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--store=") else [word])]
    return words[words.index("--store") + 1] if "--store" in words[:-1] else ""


def code_of_error(error: BaseException) -> ExitCode:
    """Return the exit code for an error that ended the command; an unexpected one is an ERROR."""
    if type(error) is errors.StorageError:  # the root itself is only raised for a name or URL that cannot be used
        return ExitCode.USAGE
    return next((code for kinds, code in _ERRORS if isinstance(error, kinds)), ExitCode.ERROR)


if __name__ == "__main__":
    main()
