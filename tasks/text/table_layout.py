"""Lays out text and tables in a terminal's width: words stay whole, and columns without room go below their row."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, zip_longest

from rich.cells import cell_len

_WORDS = re.compile(r"\(?`[^`]{1,76}`\S*|\S+")
"""A command between backticks is one word: in two lines it could not be pasted."""
_ONE_LINE = 24
"""Cells of up to this width are not wrapped."""
_BELOW = "    "
_NOTHING = ("", "–", "-")


def wrap(text: str, width: int) -> list[str]:
    """Return text in lines of at most `width` cells; a longer word has its own line."""
    if cell_len(text) <= width:
        return [text]
    return _fill(_WORDS.findall(text), width, text[: len(text) - len(text.lstrip())])


def wrap_beside(label: str, text: str, *, start: int, width: int) -> list[str]:
    """Return text in lines that begin after `start` cells; the label is before the first."""
    first, *rest = wrap(text, max(width - start, 1))
    return [f"{label:<{start}}{first}", *(" " * start + line for line in rest)]


def lay_out(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the heading, then those of each row; a row names what stands below it."""
    together = list(zip(columns, *rows, strict=True))
    natural = [max(map(cell_len, cells)) for cells in together]
    least = [max([_longest_word(name), *map(_least_width, cells)]) for name, *cells in together]
    fitting = {gap: sum(end - gap <= width for end in accumulate(size + gap for size in least)) for gap in (1, 2)}
    kept, gap = max((max(count, 1), gap) for gap, count in fitting.items())
    widths, spare = least[:kept], width - sum(least[:kept]) - gap * (kept - 1)
    for column in sorted(range(kept), key=lambda column: natural[column] - least[column]):
        more = max(min(natural[column] - least[column], spare), 0)
        widths[column], spare = least[column] + more, spare - more
    for number, cells in enumerate([columns, *rows]):
        beside = [wrap(cell, size) for cell, size in zip(cells, widths, strict=False)]
        lines = [_beside(parts, widths, " " * gap) for parts in zip_longest(*beside, fillvalue="")]
        below = list(zip(columns, cells, strict=True))[kept:] if number else []
        yield (*lines, *_listed([f"{name}: {cell}" for name, cell in below if cell not in _NOTHING], width))


def _listed(items: Sequence[str], width: int) -> list[str]:
    """Return the items on indented lines, an item on one line if it fits."""
    ended = [*(f"{item};" for item in items[:-1]), *items[-1:]]
    fits = [[item] if cell_len(item) <= width - len(_BELOW) else _WORDS.findall(item) for item in ended]
    return _fill([part for item in fits for part in item], width, _BELOW) if items else []


def _fill(words: Iterable[str], width: int, indent: str) -> list[str]:
    lines: list[str] = []
    line = indent
    for word in words:
        if line.strip() and cell_len(line) + 1 + cell_len(word) > width:
            lines.append(line)
            line = indent
        line += f" {word}" if line.strip() else word
    return [*lines, line]


def _beside(parts: Sequence[str], widths: Sequence[int], gap: str) -> str:
    return gap.join(part + " " * (size - cell_len(part)) for part, size in zip(parts, widths, strict=True)).rstrip()


def _longest_word(text: str) -> int:
    return max(map(cell_len, _WORDS.findall(text)), default=0)


def _least_width(cell: str) -> int:
    size = cell_len(cell)
    return size if size <= _ONE_LINE else max(_longest_word(cell), _ONE_LINE)
