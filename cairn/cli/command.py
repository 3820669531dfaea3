"""The `cairn` command: registers its subcommands, prints errors for people, and exits with the contract's codes.

A mistake of usage is said in one line, with how it is typed, also in the words of other tools.
"""

import atexit
import contextlib
import os
import re
import shlex
import stat
import sys
import traceback
from collections.abc import Mapping, Sequence
from inspect import getdoc
from itertools import pairwise
from pathlib import Path

from cyclopts import CycloptsError, Group, exceptions

from cairn.cli.app import app, describe_fields, read_examples
from cairn.flows.errors import EXPECTED_ERRORS
from cairn.model.errors import InvalidInput
from cairn.reports.errors import InvalidQuery, RunNotFound
from cairn.storage import errors
from cairn.storage.stores import child_process, redaction
from cairn.tasks.attempt.shutdown_signal import exit_on_notice, expect_notices
from cairn.tasks.configuration import addresses, synonyms
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
_KINDS = {int: "a whole number", float: "a number"}

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
    child_process.hide_memory()
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
    for name in (*child_process.THREAD_LIMITS, "RUST_BACKTRACE"):  # a panic of a library is told in one line
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
        say(addresses.name_store(words, _store_of(arguments), os.environ))


def _store_of(arguments: Sequence[str]) -> str:
    """Return the store that a command line names, or nothing."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--store=") else [word])]
    return words[words.index("--store") + 1] if "--store" in words[:-1] else ""


def code_of_error(error: BaseException) -> ExitCode:
    """Return the exit code for an error that ended the command; an unexpected one is an ERROR."""
    if type(error) is errors.StorageError:  # the root itself is only raised for a name or URL that cannot be used
        return ExitCode.USAGE
    return next((code for kinds, code in _ERRORS if isinstance(error, kinds)), ExitCode.ERROR)


def describe_usage_error(error: exceptions.CycloptsError, arguments: Sequence[str]) -> str:
    """Return one line: the error, and the command whose help shows the right usage."""
    problem = " ".join(str(error).partition(" Available commands:")[0].split()).removesuffix(".")
    chain, unused = error.command_chain or (), next(iter(error.unused_tokens or ()), "")
    cure = ""
    if isinstance(error, exceptions.UnknownCommandError) and error.unused_tokens:
        cure = _find_command(error.unused_tokens)
    elif isinstance(error, exceptions.UnknownOptionError) and chain:
        cure, problem = _find_option(error, chain[0], arguments), problem.partition(". Did you mean")[0]
    elif isinstance(error, exceptions.UnusedCliTokensError) and "=" in unused and chain[0] in ("train", "fork"):
        from cairn.tasks.configuration.key_reference import suggest_key

        name, _, value = unused.partition("=")
        key = suggest_key(name)
        cure = f"{unused!r}: a key is set by --set {shlex.quote(f'{key.key if key else name}={value}')}"
    elif isinstance(error, exceptions.UnusedCliTokensError) and unused:
        pairs = (f"{first} {second}" for first, second in pairwise(arguments) if second == unused)
        meant = next((name for name in pairs if Path(name).exists()), "")  # the rest of a name with a space in it
        problem = f"{unused!r}: one argument too many{f'; did you mean {shlex.quote(meant)}?' if meant else ''}"
    elif isinstance(error, exceptions.MissingArgumentError) and error.argument is not None:
        option = error.keyword or next((token.keyword for token in error.argument.tokens if token.keyword), None)
        problem = f"{option}: needs a value" if option else f"{error.argument.name.lstrip('-').upper()} is missing"
    elif isinstance(error, exceptions.CoercionError) and error.token is not None and error.target_type in _KINDS:
        name = error.token.keyword or (error.argument.name.lstrip("-").upper() if error.argument else "the value")
        problem = f"{name} {error.token.value}: must be {_KINDS[error.target_type]}"
    elif isinstance(error, exceptions.ValidationError) and error.argument is not None:
        rule = error.exception_message.removesuffix(".")
        problem = f"{error.argument.name} {error.argument.value}: {rule[:1].lower()}{rule[1:]}"
    if cure:
        return cure
    where = f"`cairn {chain[0]} --help` shows how it is used" if chain else "`cairn --help` lists the commands"
    return f"{problem}{' ' if problem.endswith('?') else '; '}{where}"


def _find_command(words: Sequence[str]) -> str:
    """Return how a command that is unknown here is typed; empty where one of ours is as likely meant, or none is."""
    word, rest = words[0], [] if any(one.startswith("-") for one in words) else words[1:]
    known, verbs = dict(synonyms.meanings("commands")), [name for name in app if not name.startswith("-")]
    if word.startswith("-"):
        verb = next((one for one in words if one in verbs), "train")
        return f"the command comes first: {shlex.join(['cairn', verb, *(one for one in words if one != verb)])}"
    line = known.get(synonyms.find_alike(word, [*verbs, *known]), "")
    if not line or line.split()[0] not in app:
        return line and f"there is no command {word}; {line}"
    purpose = (getdoc(app[line.split()[0]].default_command) or "").partition("\n")[0].removesuffix(".")
    return f"there is no command {word}; type `{shlex.join(['cairn', *line.split(), *rest])}`: {purpose}"


def _find_option(error: exceptions.UnknownOptionError, verb: str, arguments: Sequence[str]) -> str:
    """Return how an option that is unknown here is typed; empty if it is like none, nor like a configuration key."""
    token = error.token.keyword or error.token.value
    place = next(place for place, word in enumerate(arguments) if word.startswith(token))
    typed, _, given = arguments[place].partition("=")
    following = "".join(arguments[place + 1 : place + 2])
    value = redaction.redact(given or ("" if following.startswith("--") or following.endswith(".toml") else following))
    own = [name for argument in error.argument_collection if argument.parse for name in argument.names]
    here = _find_meaning(typed, own)
    if not here or (here in own and synonyms.likeness(typed, here) >= synonyms.ALIKE):
        return here and f"Unknown option: {typed}. Did you mean {here}? `cairn {verb} --help` shows how it is used"
    if here.startswith("--"):
        here = f"it is {shlex.join([here, *([value] if value else [])])}"
    elif " " not in here:
        key, _, form = here.partition("=")
        assigned = (form or "{}").replace("{}", {"True": "true", "False": "false"}.get(value, value or "true"))
        here = f"set it by --set {shlex.quote(f'{key}={assigned}')}"
    return f"cairn {verb} has no {typed}; {here}"


def _find_meaning(typed: str, own: Sequence[str]) -> str:
    """Return the option of a command, the key or the sentence that a name is here; empty if it is like none."""
    usable = dict[str, str]()
    for word, here in reversed(synonyms.meanings("options")):
        if here in own if here.startswith("--") else "--set" in own:
            usable |= {word: here, here.partition("=")[0].rpartition(".")[2]: here}
    near = synonyms.find_alike(typed, [*own, *usable])
    here = near if near in own else usable.get(near, "")
    if here in own or "--set" not in own or synonyms.likeness(typed, near) == 1:
        return here
    from cairn.tasks.configuration.key_reference import suggest_key  # takes time to import

    key, same = suggest_key(typed.lstrip("-")), usable.get(typed.rpartition(".")[2], "")
    return here if key is None else same if same.partition("=")[0] == key.key else key.key


if __name__ == "__main__":
    main()
