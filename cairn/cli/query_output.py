"""Prints a query's rows as a table or one JSON list while they arrive: they may exceed memory."""

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any

from storage.stores.document import decode, encode
from tasks.text.output import print_table, say, write_json

if TYPE_CHECKING:
    from storage.tables.table_index import Column

SHOWN_ROWS = 1_000
_LARGEST = 2**63


def print_answer(columns: "Sequence[Column]", rows: Iterable[Sequence[object]]) -> None:
    """Print an aligned table of at most `SHOWN_ROWS` rows; stderr says how many more there are."""
    remaining = iter(rows)
    shown = [[_format_cell(value) for value in row] for row in islice(remaining, SHOWN_ROWS)]
    print_table([column.name for column in columns], shown, empty="no rows")
    if more := sum(1 for _ in remaining):
        say(f"and {more:,} more rows; --json prints them all")


def print_json(columns: "Sequence[Column]", rows: Iterable[Sequence[object]]) -> None:
    """Print a list of objects: times are ISO 8601 in UTC, NaN is null, JSON columns are nested values."""
    separator = "["
    for row in rows:
        record = {column.name: _plain(value, column.type) for column, value in zip(columns, row, strict=True)}
        write_json(separator + encode(record).decode().rstrip("\n"))
        separator = ",\n"
    sys.stdout.write("[]\n" if separator == "[" else "]\n")


def _format_cell(value: object) -> str | None:
    match value:
        case None:
            return None
        case bool():
            return "yes" if value else "no"
        case float() | Decimal():
            return f"{value:.6g}"
        case datetime():
            return value.strftime("%Y-%m-%d %H:%M:%S")
        case dict() | list():
            return _json_text(value)
        case _:
            return str(value)


def _json_text(value: object) -> str:
    """Return nested values on one line."""
    return " ".join(line.strip() for line in encode(_plain(value, "")).decode().splitlines())


def _plain(value: Any, type_name: str) -> Any:
    match value:
        case str() if type_name == "JSON":
            return decode(value.encode(), object, where="a JSON column")
        case dict():
            return {str(key): _plain(item, "") for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, "") for item in value]
        case Decimal():
            return float(value)
        case bool():
            return value
        case int() if not -_LARGEST <= value < _LARGEST:
            return float(value)  # JSON readers keep no larger integers
        case _:
            return value
