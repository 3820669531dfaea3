"""The pages of docs/reference; `make docs` writes them."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import EnumType
from inspect import getdoc
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from cairn.cli.app import find_record, list_records, read_examples
from cairn.cli.command import app
from cairn.reports.queries.run_tables import ROWS, columns
from cairn.storage.logs.log_entry import Entry
from cairn.storage.logs.registry import MODEL_KINDS
from cairn.storage.logs.run_entries import RUN_KINDS
from docs.generate.configuration_page import configuration_page

_WORDS = {"str": "text", "int": "integer", "float": "number", "bool": "boolean", "datetime": "time", "NoneType": "null"}
_HEAD = "# {}\n\n`make docs` writes this page from the code.\n"
_COMMANDS_HEAD = """\
The store is `--store`, else `CAIRN_STORE`, else the configuration's, else `./cairn-store`. REFERENCE is an alias
such as `champion`, `RUN` (its newest committed checkpoint), or `RUN@STEP`.

Exit codes: 0 done · 1 error · 2 usage or invalid input · 3 gate refused, or needed by an alias or a fork · 4 budget
exhausted · 5 integrity · 6 config drift · 7 live owner elsewhere · 75 preempted, or refused by the store, resumable ·
130 interrupted, resumable.
"""
_LOG_RULES = """\
A log is a folder of objects, `runs/RUN/log/` or `models/ALIAS/log/`; each object is one entry, a JSON object with
sorted keys. JSON and SHA-256 are enough to check it:

1. The name of entry `seq` is 9999999999 - `seq` in ten digits and `.json`, so the newest is listed first. From 0 on no
   number is missing.
2. `prev` is the SHA-256 of the bytes of the entry before it, null in the first.
3. `checksum` is the SHA-256 of the object's bytes without the line that begins with ` "checksum": `. Early entries
   have none.
4. No `write_id` stands twice.
5. Entry and body have the fields and types of the tables below; an early entry may lack fields. An entry of another
   `version` than 1, or of another kind, was written by a newer program: only rules 1 to 4 are known of it and of what
   follows.
6. A run is opened once, and nothing but fork-abandoned stands before its run-opened. The first attempt-started has
   `attempt` 1, each further one 1 more, and no attempt is open by then. An attempt is open until its attempt-ended.
7. Where `writer` names an attempt, it is the open one. A checkpoint-committed is of the writer's attempt, as is a
   members-changed, and each `prefix` is committed once.
8. A checkpoint is quarantined when committed, restored when quarantined, superseded when either, deleted when
   superseded, each with the committed `manifest_sha256`. A run-deleted, once and while no attempt is open, supersedes
   them all; no attempt starts after it. A run-noted changes nothing of this.
9. `resume` names the newest eight checkpoints that are committed after this entry, newest commit first; in a log of an
   alias it is empty.
"""


def reference_pages() -> Mapping[str, str]:
    """Return the text of each page by its file name."""
    printed = {f"cairn {line}": _printed(line) for line in list_records()}
    entries = {"every entry": Entry, **RUN_KINDS, **MODEL_KINDS}
    pages = {
        "commands": _commands(),
        "json": _records("JSON", printed),
        "log": _records("Log entries", entries, _LOG_RULES),
    }
    made = {f"{name}.md": "\n".join([*lines, ""]) for name, lines in {**pages, "sql": _tables()}.items()}
    return {**made, "configuration.md": configuration_page()}


def _printed(line: str) -> Any:
    record, is_list = find_record(line)
    return tuple[record, ...] if is_list else record


def _commands() -> Iterator[str]:
    yield _HEAD.format("Commands")
    yield _COMMANDS_HEAD
    text = re.sub(r" -m [\w.]+", "", app.generate_docs(usage_name="cairn"))  # cyclopts adds how Python was started
    for section in text.split("\n## cairn ")[1:]:
        examples = (f"    {line}" for line in read_examples(section.split()[0]))
        yield from (f"## cairn {section.rstrip()}", "", "Examples:", "", *examples, "")


def _tables() -> Iterator[str]:
    yield _HEAD.format("SQL tables")
    for table in ROWS:
        rows = (f"| `{column.name}` | {column.type} |" for column in columns(table))
        yield from (f"## {table}", "", "| column | type |\n|---|---|", *rows, "")


def _records(title: str, named: Mapping[str, Any], rules: str = "") -> Iterator[str]:
    """Yield a table of what is named, then a section for each of these records and for those that their fields hold."""
    yield _HEAD.format(title) + (rules and f"\n{rules}") + "\n| | record |\n|---|---|"
    yield from (f"| `{name}` | {_type_words(hint)} |" for name, hint in named.items())
    waiting, seen = [part for hint in named.values() for part in _parts(hint)], set[type]()
    while waiting:
        if (record := waiting.pop(0)) not in seen and is_dataclass(record):
            seen.add(record)
            hints = get_type_hints(record)
            rows = (f"| `{name}` | {_type_words(hint)} |" for name, hint in hints.items())
            yield from ("", f"## {record.__name__}", "", getdoc(record) or "", "", "| field | type |\n|---|---|", *rows)
            waiting += (part for hint in hints.values() for part in _parts(hint))


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _type_words(hint: Any) -> str:
    parts, origin = [_type_words(part) for part in get_args(hint) if part is not ...], get_origin(hint)
    if is_dataclass(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if isinstance(hint, EnumType):
        return " or ".join(f'"{member.value}"' for member in hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not issubclass(get_args(hint)[0], str):
            raise TypeError(f"{hint}: an object of JSON has text as its keys")
        return f"object of {_as_part(parts[-1])}"
    if origin is tuple:
        return f"list of {_as_part(parts[0])}"
    return " or ".join(parts) or _WORDS.get(hint.__name__, "any value")


def _as_part(words: str) -> str:
    return f"({words})" if " or " in words else words


if __name__ == "__main__":
    for page, text in reference_pages().items():
        Path(sys.argv[1], page).write_text(text, encoding="utf-8")
