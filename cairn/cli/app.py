"""The cyclopts application, the options that several commands take, their completion, and the ends of their help."""

import math
import os
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from glob import escape, glob
from importlib.resources import files
from inspect import getdoc
from pkgutil import resolve_name
from typing import Annotated, Any

from cyclopts import App, Group, Parameter, completion, validators

from cairn.reports.queries.run_lookup import find_run
from cairn.storage.logs import registry, run_index, run_log
from cairn.storage.stores import object_store, open_store
from cairn.tasks.configuration import addresses
from cairn.tasks.machine.placement import CAIRN_VERSION

START_HERE = """Start here:
  cairn train quickstart                    train a small model, or continue it
  cairn init texts                          a configuration for your own text
  cairn status quickstart                   where it stands, what happens next
  cairn sample champion --prompt "def "     what it writes
Every command takes --json; `cairn COMMAND --help` ends with examples."""


def complete_run(context: completion.CompletionContext) -> Iterator[tuple[str, str]]:
    """Yield the runs of the store that a half-typed command line means."""
    store = open_chosen_store(context["store"].raw or "")
    yield from ((run_id, "run") for run_id in run_index.list_run_ids(store))


def complete_alias(context: completion.CompletionContext) -> Iterator[tuple[str, str]]:
    """Yield the aliases of that store."""
    store = open_chosen_store(context["store"].raw or "")
    yield from ((alias, "alias") for alias in registry.list_aliases(store))


def complete_reference(context: completion.CompletionContext) -> Iterator[tuple[str, str]]:
    """Yield aliases and runs, and the readable checkpoints of a run behind whose name an @ is typed."""
    run_id, at, _ = context.incomplete.partition("@")
    if not at:
        yield from complete_alias(context)
        yield from complete_run(context)
        return
    checkpoints = open_run_log(context["store"].raw or "", run_id).state.readable
    yield from ((f"{run_id}@{record.committed.step}", "checkpoint") for record in checkpoints)


def complete_argument(context: completion.CompletionContext) -> Iterator[str | tuple[str, str]]:
    """Yield the words for any other argument: its choices, runs, keys, names of shipped files, files."""
    argument, name, word = context.argument, context.argument.names[0], context.incomplete
    yield from argument.get_choices(force=True) or ()
    if name in ("--run", "--run-id"):
        yield from complete_run(context)
    elif name in ("--set", "--key"):
        from cairn.tasks.configuration.key_reference import keys_by_name

        yield from ((f"{key.key}{'=' if name == '--set' else ''}", key.summary) for key in keys_by_name().values())
    elif argument.hint in (str, tuple[str, ...]):
        if place := {"--config": addresses.CONFIGURATIONS, "--suite": addresses.SUITES}.get(name):
            yield from ((known, f"in {place}") for known in addresses.known_names(place))
        yield from (f"{path}/" if os.path.isdir(path) else path for path in sorted(glob(f"{escape(word)}*")))


app = App(
    name="cairn",
    help="Trains GPTs on machines that will be taken away, and leaves tracks.",
    version=f"cairn {CAIRN_VERSION}",
    help_format="plaintext",
    help_epilogue=START_HERE,
    group_commands=Group("More", sort_key=99),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(show_default=False, completer=complete_argument),
)

Url = Annotated[str, Parameter(name="--store", help="folder or URL of the store [CAIRN_STORE, ./cairn-store]")]
Json = Annotated[bool, Parameter(name="--json", negative="", help="print one JSON document on stdout")]
Why = Annotated[str, Parameter(name="--why", help="your reason, for the record")]
Reference = Annotated[str, Parameter(help="an alias such as champion, RUN, or RUN@STEP", completer=complete_reference)]
Alias = Annotated[str, Parameter(name="--alias", help="the name that points at a checkpoint", completer=complete_alias)]
SnapshotName = Annotated[
    str, Parameter(help="a snapshot's id, at least 8 characters of it, RUN, or FILE.toml", completer=complete_run)
]
Overrides = Annotated[tuple[str, ...], Parameter(name="--set", negative="", help="section.key=value; may be repeated")]
Flag = Annotated[bool, Parameter(negative="")]
Seconds = Annotated[float, Parameter(validator=validators.Number(gt=0, lt=math.inf))]


def open_chosen_store(given: str) -> object_store.ObjectStore:
    """Return the store that a command means."""
    return open_store.open_store(addresses.choose_store(given, os.environ))


def open_run_log(given_store: str, run: str) -> run_log.RunLog:
    """Return the log of a run, read to its end; raises `RunNotFound`."""
    return find_run(open_chosen_store(given_store), run)


@cache
def list_records() -> Mapping[str, str]:
    """Return the name of the record that each command but `sql` prints with `--json`; a star stands for a list."""
    return tomllib.loads((files("cairn.cli") / "records.toml").read_text(encoding="utf-8"))


def find_record(line: str) -> tuple[Any, bool]:
    """Return the record that a command line prints, and whether it prints a list of them."""
    name = list_records()[line]
    return resolve_name(name.removesuffix("*")), name.endswith("*")


def read_examples(verb: str) -> list[str]:
    """Return the example lines of a command: those at the end of its docstring."""
    documented = getdoc(app[verb].default_command) or ""
    return [line.strip() for line in documented.partition("\nExamples:\n")[2].splitlines()]


def describe_fields(verb: str) -> str:
    """Return the fields of the record that a command prints with --json, and where those of its options are."""
    if verb not in list_records():
        return "JSON: a list of objects, one a row, with the columns as names."
    record, is_list = find_record(verb)
    others = [line.removeprefix(f"{verb} ") for line in list_records() if line.startswith(f"{verb} ")]
    more = f" With {' or '.join(others)}: docs/reference/json.md." if others else ""
    text = f"JSON: {'a list of ' if is_list else ''}{', '.join(field.name for field in fields(record))}.{more}"
    return textwrap.fill(text, 78, break_on_hyphens=False)
