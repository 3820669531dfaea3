"""What is wrong with a command line, in words of our own; the parser's are about tokens and types."""

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from cyclopts import CoercionError, CycloptsError, MissingArgumentError, UnusedCliTokensError

_KINDS = {int: "a whole number", float: "a number"}


def describe_usage_error(error: CycloptsError, arguments: Sequence[str]) -> str:
    """Return one line: what is wrong, and the command that shows how it is right."""
    problem = _problem(error, arguments)
    chain = error.command_chain
    where = f"`cairn {chain[0]} --help` shows how it is used" if chain else "`cairn --help` lists the commands"
    return f"{problem}{' ' if problem.endswith('?') else '; '}{where}"


def _problem(error: CycloptsError, arguments: Sequence[str]) -> str:
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return _too_many(error.unused_tokens[0], arguments)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        option = error.keyword or next((token.keyword for token in error.argument.tokens if token.keyword), None)
        return f"{option}: needs a value" if option else f"{error.argument.name.lstrip('-').upper()} is missing"
    if isinstance(error, CoercionError) and error.token is not None and error.target_type in _KINDS:
        name = error.token.keyword or (error.argument.name.lstrip("-").upper() if error.argument else "the value")
        return f"{name} {error.token.value}: must be {_KINDS[error.target_type]}"
    return " ".join(str(error).partition(" Available commands:")[0].split()).removesuffix(".")


def _too_many(unused: str, arguments: Sequence[str]) -> str:
    """Return the words for an argument too many, which may be the rest of a name with a space in it."""
    for first, second in pairwise(arguments):
        if second == unused and Path(f"{first} {second}").exists():
            return f"{unused!r}: one argument too many; did you mean {shlex.quote(f'{first} {second}')}?"
    return f"{unused!r}: one argument too many"
