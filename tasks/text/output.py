"""Prints results on stdout, as one JSON document or as text, and messages on stderr. All text is sanitized."""

import codecs
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from storage.stores.document import encode
from tasks.errors import TaskError
from tasks.text.format import format_value
from tasks.text.sanitize import sanitize, sanitize_cell, sanitize_json

_PIPE_COLUMNS = 200
_ESCAPE = "cairn-escape"


def print_document(record: object) -> None:
    """Print a record as sorted JSON, times in UTC; a closed pipe is ignored, any other failure is a `TaskError`."""
    try:
        sys.stdout.write(sanitize_json(encode(record).decode()))
    except BrokenPipeError:
        discard_stdout()
    except OSError as error:
        discard_stdout()
        raise TaskError(f"the output could not be written: {error}") from error


def escape_unencodable_output() -> None:
    r"""Let stdout write a character that its encoding lacks as \uXXXX, which JSON reads too; stderr escapes anyway."""
    codecs.register_error(_ESCAPE, _escape_unencodable)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPE)


def discard_stdout() -> None:
    """Send all further output to nowhere, so that the interpreter's last flush does not fail."""
    _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print rows under headings; without rows, print `empty` on stderr."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(sanitize_cell(format_value(value))) for value in row))
    if not table.row_count:
        say(empty)
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    console.print(table)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values, one per line, aligned."""
    lines = [(name, sanitize_cell(format_value(value))) for name, value in facts]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value}")


def print_line(text: str) -> None:
    """Print text on stdout."""
    print(sanitize(text))


def say(message: str) -> None:
    """Print a message on stderr at once; a stderr that cannot be written is ignored from then on."""
    try:
        print(sanitize(message), file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
