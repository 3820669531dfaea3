"""What Tab can add to a line of `cairn`: verbs, options, choices, and what the store and the configuration know.

The scripts of the shells ask with `cairn --complete LINE` (the line up to the cursor); files are theirs to complete.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import getdoc
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from cairn.cli.app import app
from reports.queries.run_lookup import find_run
from storage.logs.registry import list_aliases
from storage.logs.run_index import list_run_ids
from storage.stores.open_store import open_store
from tasks.configuration.addresses import choose_store

if TYPE_CHECKING:
    from cyclopts.argument import Argument

REQUEST = "--complete"
FILES = ":files"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A word that would fit, or `FILES`, which asks the shell for files; `meaning` is one line or empty."""

    value: str
    meaning: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TypedLine:
    """A line as far as it was typed: what stands before the word at its end, and that word."""

    word: str
    verb: str = ""
    store: str = ""
    positionals: int = 0
    option: str = ""
    before_value: str = ""


def complete_line(line: str, environment: Mapping[str, str]) -> Iterator[Candidate]:
    """Yield the words that may stand at the end of the line."""
    words = _split(line)[1:]
    if len(words) < 2:
        typed = TypedLine(word="".join(words))
        found = _verbs(options=typed.word.startswith("-"))
    elif words[0] in app:
        arguments = app[words[0]].assemble_argument_collection(parse_docstring=True)
        typed = _read(words, {name: argument for argument in arguments for name in argument.names})
        found = _candidates(typed, arguments, environment)
    else:
        return
    for candidate in found:
        if candidate.value == FILES or candidate.value.startswith(typed.word):
            yield Candidate(value=typed.before_value + candidate.value, meaning=candidate.meaning)


def _split(line: str) -> list[str]:
    """Split as a shell would; an open quote ends with the line, and behind a space there is an empty word."""
    for quote in ("", '"', "'"):
        try:
            words = shlex.split(line + quote)
        except ValueError:
            continue
        return [*words, ""] if not quote and line[-1:].isspace() else words
    return []


def _verbs(*, options: bool) -> Iterator[Candidate]:
    for name in app:
        if options and name.startswith("--"):
            yield Candidate(value=name)
        elif not options and not name.startswith("-"):
            yield Candidate(value=name, meaning=(getdoc(app[name].default_command) or "").partition("\n")[0])


def _read(words: list[str], options: "Mapping[str, Argument]") -> TypedLine:
    settled, option, positionals = dict[str, str](), "", 0
    verb, *before, word = words
    for text in before:
        name, equals, value = text.partition("=")
        if option or (name in options and equals):
            settled[option or name], option = (text if option else value), ""
        elif name in options:
            option = name if options[name].hint is not bool else ""
        elif not text.startswith("-"):
            positionals += 1
    name, equals, value = word.partition("=")
    before_value = f"{name}=" if not option and name in options and equals else ""
    if before_value:
        option, word = name, value
    store = settled.get("--store", "")
    return TypedLine(
        verb=verb, store=store, positionals=positionals, option=option, word=word, before_value=before_value
    )


def _candidates(
    typed: TypedLine, arguments: "Iterable[Argument]", environment: Mapping[str, str]
) -> Iterator[Candidate]:
    if not typed.option and typed.word.startswith("-"):
        shown = (argument for argument in arguments if not argument.names[0].startswith("*"))
        yield from (Candidate(value=a.names[0], meaning=f"{a.parameter.help or ''}") for a in shown)
        yield Candidate(value="--help", meaning="show what it does")
        return
    for argument in arguments:
        if typed.option in argument.names if typed.option else argument.index == typed.positionals:
            yield from _values(typed, argument, environment)


def _values(typed: TypedLine, argument: "Argument", environment: Mapping[str, str]) -> Iterator[Candidate]:
    name, names_snapshot = argument.names[0], typed.verb in ("data", "export-tokens")
    choices = [part for part in (argument.hint, *get_args(argument.hint)) if get_origin(part) is Literal]
    if choices:
        yield from (Candidate(value=choice) for choice in get_args(choices[0]))
    elif name in ("--run", "--run-id", "--reference", "--alias"):
        store = open_store(choose_store(typed.store, environment))
        if name == "--reference" and "@" in typed.word and not names_snapshot:
            run_id = typed.word.partition("@")[0]
            steps = (record.committed.step for record in find_run(store, run_id).state.readable)
            yield from (Candidate(value=f"{run_id}@{step}", meaning="checkpoint") for step in steps)
            return
        if name in ("--reference", "--alias") and not names_snapshot:
            yield from (Candidate(value=alias, meaning="alias") for alias in list_aliases(store))
        if name != "--alias":
            yield from (Candidate(value=run_id, meaning="run") for run_id in list_run_ids(store))
    elif name in ("--set", "--key"):
        from tasks.configuration.key_reference import list_keys

        ending = "=" if name == "--set" else ""
        yield from (Candidate(value=f"{key.key}{ending}", meaning=key.summary) for key in list_keys())
    elif argument.hint in (str, tuple[str, ...]):
        from tasks.configuration.addresses import CONFIGURATIONS, SUITES, known_names

        if place := {"--config": CONFIGURATIONS, "--suite": SUITES}.get(name):
            yield from (Candidate(value=known, meaning=f"in {place}") for known in known_names(place))
        yield Candidate(value=FILES)
