"""A report as Markdown: reads well as it is, and wherever Markdown is shown.

Owns the escaping: whatever a run id, an error or a sample holds, it stays text and cannot break a table, begin a tag or
steer a terminal. Refuses to know what is reported.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from reports.pages.report_blocks import CURVE, Block, Facts, Fold, Picture, Section, Table, Verbatim, Words
from tasks.text.format import format_value, one_line
from tasks.text.sanitize import sanitize

_SPECIAL = re.compile(r"([\\*\[\]|#~!`]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))")
_LEVELS = "▁▂▃▄▅▆▇█"
_SPARKS = 60


def markdown_page(title: str, sections: Sequence[Section], losses: Sequence[float]) -> str:
    """Return the report; `losses` along the run become a line of bars."""
    lines = [f"# {markdown_text(title)}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            lines += [*_lines(block, losses), ""]
    return "\n".join(lines)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; text in cells stays text."""
    cells = ([markdown_text(format_value(value)) for value in row] for row in rows)
    lines = [[markdown_text(column) for column in columns], ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sparkline(values: Sequence[float], width: int = _SPARKS) -> str:
    """Return numbers as a line of bars between the least and the greatest; numbers that are none become spaces."""
    every = max(-(-len(values) // width), 1)
    shown = [values[number] for number in range(0, len(values), every)]
    finite = [value for value in shown if abs(value) < float("inf")]
    if not finite:
        return ""
    least, size = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        _LEVELS[round((value - least) / size * (len(_LEVELS) - 1))] if abs(value) < float("inf") else " "
        for value in shown
    )


def _lines(block: Block, losses: Sequence[float]) -> Iterator[str]:
    match block:
        case Facts():
            yield from (f"- **{markdown_text(name)}**: {markdown_text(value)}" for name, value in block.rows)
        case Words():
            yield markdown_text(block.text)
        case Verbatim():
            yield from _fenced(block.text)
        case Table():
            yield markdown_table(block.filled.columns, block.filled.rows)
        case Fold():
            yield f"<details><summary>{markdown_text(block.title)}</summary>"
            yield ""
            yield from _lines(block.block, losses)
            yield ""
            yield "</details>"
        case Picture():
            yield markdown_text(block.text)
            if block.name == CURVE and losses:
                yield from ("", *_fenced(f"{losses[0]:.4g} {sparkline(losses)} {losses[-1]:.4g}"))


def _fenced(text: str) -> Iterator[str]:
    """Yield text as it is, between fences longer than any it holds itself."""
    text = sanitize(text)
    longest = max((len(found) for found in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from (fence, *text.split("\n"), fence)


def markdown_text(text: str) -> str:
    """Return text on one line in which nothing is Markdown but a pair of backquotes around a command."""
    escaped = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    parts = escaped.split("`")
    if len(parts) % 2 == 0 or "|" in "".join(parts[1::2]):
        return _SPECIAL.sub(r"\\\1", escaped)
    return "`".join(part if number % 2 else _SPECIAL.sub(r"\\\1", part) for number, part in enumerate(parts))
