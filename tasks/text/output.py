"""What a verb says: one JSON document on stdout, or a table for people there; everything else on stderr.

Owns the looks, and that nothing of what is shown can steer the terminal it is shown on, whoever wrote it. Refuses to
know what is shown.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

from storage.stores.document import encode
from tasks.errors import TaskError
from tasks.text.format import format_value
from tasks.text.sanitize import sanitize, sanitize_json

_PIPE_COLUMNS = 200


def print_document(record: object) -> None:
    """Print a record as one JSON document: sorted keys, times ISO 8601 in UTC.

    A reader that has gone costs the words; a disk that is full is a `TaskError`: somebody counts on the file.
    """
    try:
        sys.stdout.write(sanitize_json(encode(record).decode()))
    except BrokenPipeError:
        forget_stdout()
    except OSError as error:
        forget_stdout()
        raise TaskError(f"the output could not be written: {error}") from error


def forget_stdout() -> None:
    """Let all further output go nowhere; or the interpreter's last flush would complain at its very end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print rows under headings; `empty` is said on stderr when there is no row."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(sanitize(format_value(value))) for value in row))
    if not table.row_count:
        say(empty)
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    console.print(table)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values, one a line, aligned."""
    listed = [(name, sanitize(format_value(value), kept="\t")) for name, value in facts]
    width = max(len(name) for name, _ in listed)
    for name, value in listed:
        print(f"{name:<{width}}  {value}")


def print_line(text: str) -> None:
    """Print text for people on stdout, on as many lines as it has."""
    print(sanitize(text))


def say(message: str) -> None:
    """Print a line for people on stderr at once; where nobody listens any more the words are lost, and nothing else."""
    with suppress(OSError):
        print(sanitize(message), file=sys.stderr, flush=True)
