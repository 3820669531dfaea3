"""Text and tables as Markdown. Text of a run stays text: it ends no table and begins no tag."""

import re

from reports.queries.display_tables import Table, format_cell
from tasks.text.format import one_line
from tasks.text.sanitize import sanitize

_SPECIAL = re.compile(r"([\\*\[\]|#~!`]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))")


def markdown_text(text: str) -> str:
    """Return text on one line in which nothing is Markdown except a pair of backquotes around a command."""
    escaped = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    parts = escaped.split("`")
    if len(parts) % 2 == 0 or "|" in "".join(parts[1::2]):
        return _SPECIAL.sub(r"\\\1", escaped)
    return "`".join(part if number % 2 else _SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts))


def markdown_table(table: Table) -> str:
    """Return a Markdown table."""
    rows = [[markdown_text(format_cell(value)) for value in row] for row in table.rows]
    lines = [[markdown_text(column) for column in table.columns], ["---"] * len(table.columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fence(text: str) -> str:
    """Return text as it is between fences that are longer than any it contains."""
    shown = sanitize(text)
    longest = max((len(found) for found in re.findall("`+", shown)), default=0)
    mark = "`" * max(3, longest + 1)
    return f"{mark}\n{shown}\n{mark}"
