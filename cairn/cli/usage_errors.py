"""Says in one line what is wrong with a command line, and how it is typed, also in the words of other tools."""

import shlex
from collections.abc import Sequence
from inspect import getdoc
from itertools import pairwise
from pathlib import Path

from cyclopts import exceptions

from cairn.cli.app import app
from cairn.storage.stores.redaction import redact
from cairn.tasks.configuration.synonyms import ALIKE, find_alike, likeness, meanings

_KINDS = {int: "a whole number", float: "a number"}


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
    known, verbs = dict(meanings("commands")), [name for name in app if not name.startswith("-")]
    if word.startswith("-"):
        verb = next((one for one in words if one in verbs), "train")
        return f"the command comes first: {shlex.join(['cairn', verb, *(one for one in words if one != verb)])}"
    line = known.get(find_alike(word, [*verbs, *known]), "")
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
    value = redact(given or ("" if following.startswith("--") or following.endswith(".toml") else following))
    own = [name for argument in error.argument_collection if argument.parse for name in argument.names]
    here = _find_meaning(typed, own)
    if not here or (here in own and likeness(typed, here) >= ALIKE):
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
    for word, here in reversed(meanings("options")):
        if here in own if here.startswith("--") else "--set" in own:
            usable |= {word: here, here.partition("=")[0].rpartition(".")[2]: here}
    near = find_alike(typed, [*own, *usable])
    here = near if near in own else usable.get(near, "")
    if here in own or "--set" not in own or likeness(typed, near) == 1:
        return here
    from cairn.tasks.configuration.key_reference import suggest_key  # takes time to import

    key, same = suggest_key(typed.lstrip("-")), usable.get(typed.rpartition(".")[2], "")
    return here if key is None else same if same.partition("=")[0] == key.key else key.key
