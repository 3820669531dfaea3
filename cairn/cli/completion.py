"""What Tab can add to a line of `cairn`: verbs, options, choices, and what the store and the configuration know.

The scripts of the shells ask with `cairn --complete LINE` (the line up to the cursor); files are theirs to complete.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import getdoc
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from cairn.cli.app import app
from storage.stores.open_store import open_store
from tasks.configuration.addresses import choose_store

if TYPE_CHECKING:
    from cyclopts import ArgumentCollection
    from cyclopts.argument import Argument

    from storage.stores.object_store import ObjectStore

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

    verb: str
    store: str
    positionals: int
    option: str
    word: str
    before_value: str = ""


def complete_line(line: str, environment: Mapping[str, str]) -> Iterator[Candidate]:
    """Yield the words that may stand at the end of the line."""
    words = _split(line)[1:]
    if len(words) < 2:
        typed = TypedLine(verb="", store="", positionals=0, option="", word="".join(words))
        found: Iterable[Candidate] = _verbs(options=typed.word.startswith("-"))
    elif words[0] not in app:
        return
    else:
        arguments = app[words[0]].assemble_argument_collection(parse_docstring=True)
        typed = _read(words, {name: argument for argument in arguments for name in argument.names})
        found = _candidates(typed, arguments, environment)
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
    joined = not option and name in options and bool(equals)
    return TypedLine(
        verb=verb,
        store=settled.get("--store", ""),
        positionals=positionals,
        option=name if joined else option,
        word=value if joined else word,
        before_value=f"{name}=" if joined else "",
    )


def _candidates(
    typed: TypedLine, arguments: "ArgumentCollection", environment: Mapping[str, str]
) -> Iterator[Candidate]:
    if not typed.option and typed.word.startswith("-"):
        shown = (argument for argument in arguments if not argument.names[0].startswith("*"))
        yield from (Candidate(value=a.names[0], meaning=f"{a.parameter.help or ''}") for a in shown)
        yield Candidate(value="--help", meaning="show what it does")
        return
    for argument in arguments:
        if typed.option in argument.names if typed.option else argument.index == typed.positionals:
            yield from _values(typed, argument, lambda: open_store(choose_store(typed.store, environment)))


def _values(typed: TypedLine, argument: "Argument", opened: "Callable[[], ObjectStore]") -> Iterator[Candidate]:
    name = argument.names[0]
    choices = [part for part in (argument.hint, *get_args(argument.hint)) if get_origin(part) is Literal]
    if choices:
        yield from (Candidate(value=choice) for choice in get_args(choices[0]))
    elif name in ("--run", "--run-id") or (name == "--reference" and typed.verb in ("data", "export-tokens")):
        yield from _runs(opened())
    elif name == "--reference" and "@" in typed.word:
        yield from _steps(typed.word, opened())
    elif name == "--reference":
        yield from (*_aliases(opened()), *_runs(opened()))
    elif name == "--alias":
        yield from _aliases(opened())
    elif name in ("--set", "--key"):
        yield from _keys("=" if name == "--set" else "")
    elif argument.hint in (str, tuple[str, ...]):
        yield from _names(name)
        yield Candidate(value=FILES)


def _runs(store: "ObjectStore") -> Iterator[Candidate]:
    from storage.logs.run_index import list_run_ids

    yield from (Candidate(value=run_id, meaning="run") for run_id in list_run_ids(store))


def _aliases(store: "ObjectStore") -> Iterator[Candidate]:
    from storage.logs.registry import list_aliases

    yield from (Candidate(value=alias, meaning="alias") for alias in list_aliases(store))


def _steps(word: str, store: "ObjectStore") -> Iterator[Candidate]:
    from reports.queries.run_lookup import find_run

    run_id = word.partition("@")[0]
    for record in find_run(store, run_id).state.readable:
        yield Candidate(value=f"{run_id}@{record.committed.step}", meaning="checkpoint")


def _keys(ending: str) -> Iterator[Candidate]:
    from tasks.configuration.key_reference import list_keys

    yield from (Candidate(value=f"{key.key}{ending}", meaning=key.summary) for key in list_keys())


def _names(option: str) -> Iterator[Candidate]:
    from tasks.configuration.addresses import CONFIGURATIONS, SUITES, known_names

    if place := {"--config": CONFIGURATIONS, "--suite": SUITES}.get(option):
        yield from (Candidate(value=name, meaning=f"in {place}") for name in known_names(place))
