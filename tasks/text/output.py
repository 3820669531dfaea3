"""Prints results on stdout, as one JSON document or as text in the terminal's width, and messages on stderr, sanitized.

Words stay whole, and columns without room go below their row. In a CI job no text is taken for a command: GitHub's
begin a line with `::`, Azure's `##vso[…]` stand anywhere in one.
"""

import codecs
import io
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import TextIO

from cairn.storage.stores.codec import encode
from cairn.tasks.errors import TaskError
from cairn.tasks.text.format import format_value, sanitize, sanitize_cell, sanitize_json

_PIPE_COLUMNS = 200
_MARKS = ("CI", "GITHUB_ACTIONS", "TF_BUILD", "TEAMCITY_VERSION")
_COMMAND = re.compile(r"((?:^|[\r\n])\s*:)(?=:)|(##[\w.-]*)(?=\[)")
_KEPT_CHARACTERS = 64
_FOREIGN = re.compile(r"[^\x00-\x7f]+")
_PLAIN = "cairn-plain"
_SIGNS = str.maketrans({"→": ">", "–": "-", "·": "-", "×": "x", "…": "...", "━": "=", "─": "-"})
_WORDS = re.compile(r"\(?`[^`]{1,76}`\S*|\S+")
"""A command between backticks is one word: in two lines it could not be pasted."""
_ONE_LINE = 24
"""Cells of up to this width are not wrapped."""
_NOTHING = ("", "–", "-")


def print_document(record: object) -> None:
    """Print a record as sorted JSON, times in UTC; a closed pipe is ignored, any other failure is a `TaskError`."""
    try:
        write_json(encode(record).decode())
        sys.stdout.flush()  # `watch` goes on for days
    except OSError as error:
        discard_output(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise TaskError(f"the output could not be written: {error.strerror}") from error


def write_json(document: str) -> None:
    """Write JSON on stdout, escaped where the encoding is no Unicode: it stays the same document."""
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = sanitize_json(document)
    sys.stdout.write(text if is_unicode else _FOREIGN.sub(lambda found: json.dumps(found[0])[1:-1], text))


def escape_unencodable_output() -> None:
    r"""Let the output have plain characters for signs of ours that its encoding lacks, and \uXXXX for all others."""
    codecs.register_error(_PLAIN, _replace_unencodable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAIN)


def break_commands(text: str) -> str:
    """Return text in which `:|:` and `##…|[` stand for the beginnings of commands."""
    return _COMMAND.sub(r"\g<0>|", text)


def guard_log(environment: Mapping[str, str]) -> None:
    """In a CI job, break the commands in all that is printed from now on, except into a file."""
    if all(environment.get(mark, "").lower() in ("", "0", "false") for mark in _MARKS):
        return
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            setattr(sys, name, CommandFreeStream(stream))


class CommandFreeStream(io.TextIOWrapper):
    """Writes to another stream's buffer; a command is broken even if its characters come one by one."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering
        )
        self._line = ""
        self._stream = stream  # it would close the buffer when nothing refers to it

    def write(self, text: str) -> int:
        """Write text; the characters added to it depend only on the line so far."""
        whole = self._line + text
        super().write(break_commands(whole)[len(break_commands(self._line)) :])
        line = re.split(r"[\r\n]", whole)[-1].lstrip()
        self._line = line if len(line) <= _KEPT_CHARACTERS else "-" + line[-_KEPT_CHARACTERS:]
        return len(text)


def discard_output(stream: TextIO) -> None:
    """Send all further output to nowhere, so that the interpreter's last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def output_columns() -> int | None:
    """Return the width of the terminal, or COLUMNS; None where the output is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print rows under headings, as wide as the terminal; without rows, print `empty` on stderr."""
    cells = [[sanitize_cell(format_value(value)).expandtabs() for value in row] for row in rows]
    if not cells:
        say(empty)
        return
    heading, *below = lay_out(columns, cells, output_columns() or _PIPE_COLUMNS)
    is_bold = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    print("\n".join(f"\x1b[1m{line}\x1b[m" if is_bold else line for line in heading))
    for lines in below:
        print("\n".join(lines))
    sys.stdout.flush()  # `watch` goes on for days


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names and values, aligned; a value wider than the terminal takes several lines."""
    lines = [(name, sanitize_cell(format_value(value))) for name, value in facts]
    size = max(len(name) for name, _ in lines) + 2
    columns = output_columns()
    for name, value in lines:
        print("\n".join(wrap_beside(name, value, start=size, width=columns)) if columns else f"{name:<{size}}{value}")


def print_line(text: str) -> None:
    """Print text on stdout, its lines wrapped where the terminal is narrower."""
    columns = output_columns()
    for line in sanitize(text).split("\n"):
        print("\n".join(wrap(line, columns)) if columns else line)


def say(message: str) -> None:
    """Print a message on stderr at once; a stderr that cannot be written is ignored from then on."""
    try:
        print(sanitize(message), file=sys.stderr, flush=True)
    except OSError:
        discard_output(sys.stderr)


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end].translate(_SIGNS))[1:-1], error.end


def wrap(text: str, width: int) -> list[str]:
    """Return text in lines of at most `width` cells, all indented as it is; a longer word has its own line."""
    if _cells(text) <= width:
        return [text]
    lines, indent = [], text[: len(text) - len(text.lstrip())]
    line = indent
    for word in _WORDS.findall(text):
        if line.strip() and _cells(line) + 1 + _cells(word) > width:
            lines.append(line)
            line = indent
        line += f" {word}" if line.strip() else word
    return [*lines, line]


def wrap_beside(label: str, text: str, *, start: int, width: int) -> list[str]:
    """Return text in lines that begin after `start` cells; the label is before the first."""
    first, *rest = wrap(text, max(width - start, 1))
    return [f"{label:<{start}}{first}", *(" " * start + line for line in rest)]


def lay_out(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the heading, then those of each row; a row names the cells below it."""
    together = list(zip(columns, *rows, strict=True))
    natural = [max(map(_cells, cells)) for cells in together]
    least = [max(_least_width(cell, _ONE_LINE if number else 0) for number, cell in enumerate(it)) for it in together]
    fitting = {gap: sum(end - gap <= width for end in accumulate(size + gap for size in least)) for gap in (1, 2)}
    kept, gap = max((max(count, 1), gap) for gap, count in fitting.items())
    widths, spare = least[:kept], width - sum(least[:kept]) - gap * (kept - 1)
    for column in sorted(range(kept), key=lambda column: natural[column] - least[column]):
        more = max(min(natural[column] - least[column], spare), 0)
        widths[column], spare = least[column] + more, spare - more
    for number, cells in enumerate([columns, *rows]):
        beside = zip_longest(*map(wrap, cells, widths), fillvalue="")
        lines = [(" " * gap).join(map(_fill, parts, widths)).rstrip() for parts in beside]
        below = list(zip(columns, cells, strict=True))[kept:] if number else []
        named = "; ".join(f"{name}: {cell}" for name, cell in below if cell not in _NOTHING)
        yield (*lines, *(wrap(f"    {named}", width) if named else ()))


def _fill(text: str, width: int) -> str:
    return text + " " * (width - _cells(text))


def _cells(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # takes time to import

    return cell_len(text)


def _least_width(text: str, one_line: int) -> int:
    """Return the width of the longest word, or of the whole text where that is at most `one_line`."""
    words = max(map(_cells, _WORDS.findall(text)), default=0)
    return min(_cells(text), max(words, one_line))
