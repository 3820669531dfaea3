"""A report as one HTML file: no network, no script, light or dark as the reader's machine is.

Owns looks and escaping: everything that came from a run goes through `html.escape`. The picture is inside as PNG, the
timeline as SVG. Refuses to know what is reported. Equal reports give equal bytes.
"""

import base64
import html
from collections.abc import Iterator, Sequence

from reports.pages.report_blocks import CURVE, Block, Facts, Fold, Picture, Section, Table, Verbatim, Words
from reports.pages.report_style import STYLE
from reports.pages.report_timeline import css_class, timeline_svg
from reports.queries.receipts import Receipt
from tasks.text.format import format_value, one_line
from tasks.text.sanitize import sanitize

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Said to the browser too: what is in a run can neither run nor load anything."""


def html_page(title: str, sections: Sequence[Section], *, attempts: Sequence[Receipt], picture: bytes) -> str:
    """Return the page; `picture` is the curve as PNG, empty where there is none."""
    drawing = _Drawing(attempts, picture)
    shown = _escaped(title)
    contents = "".join(f'<li><a href="#{_anchor(section)}">{_escaped(section.title)}</a></li>' for section in sections)
    body = "\n".join(
        f'<section id="{_anchor(section)}"><h2>{_escaped(section.title)}</h2>\n'
        f"{chr(10).join(_block(block, drawing) for block in section.blocks)}</section>"
        for section in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{shown}</title><style>{STYLE}</style></head>\n<body><header><h1>{shown}</h1>'
        f'<nav aria-label="Sections"><ul>{contents}</ul></nav></header>\n<main>\n{body}\n</main></body></html>\n'
    )


class _Drawing:
    """The pictures a page has."""

    def __init__(self, attempts: Sequence[Receipt], picture: bytes) -> None:
        """Keep what they are made of."""
        self._attempts, self._picture = attempts, picture

    def draw(self, block: Picture) -> str:
        """Return the picture with its caption, which also is what those hear who do not see it."""
        caption = f"<figcaption>{_escaped(block.text)}</figcaption>"
        if block.name != CURVE:
            return f"<figure>{timeline_svg(self._attempts, block.text)}{caption}</figure>"
        if not self._picture:
            return f"<p>{_escaped(block.text)}</p>"
        data = base64.b64encode(self._picture).decode()
        return f'<figure><img src="data:image/png;base64,{data}" alt="{_escaped(block.text)}">{caption}</figure>'


def _block(block: Block, drawing: _Drawing) -> str:
    match block:
        case Facts():
            rows = (f"<div><dt>{_escaped(name)}</dt><dd>{_commands(value)}</dd></div>" for name, value in block.rows)
            return f"<dl>{''.join(rows)}</dl>"
        case Words():
            return f"<p>{_commands(block.text)}</p>"
        case Verbatim():
            return f"<pre>{html.escape(sanitize(block.text))}</pre>"
        case Table():
            return "".join(_table(block.filled))
        case Fold():
            return f"<details><summary>{_escaped(block.title)}</summary>{_block(block.block, drawing)}</details>"
        case Picture():
            return drawing.draw(block)


def _table(table: Table) -> Iterator[str]:
    texts = [[format_value(value) for value in row] for row in table.rows]
    numbers = [all(_is_number(text) for text in column) for column in zip(*texts, strict=True)]
    sides = [" class=n" if is_number else "" for is_number in numbers] or [""] * len(table.columns)
    heads = (f'<th scope="col"{side}>{_escaped(name)}</th>' for name, side in zip(table.columns, sides, strict=True))
    coloured = table.columns.index(table.reasons) if table.reasons else -1
    yield '<div class="wide" role="region" tabindex="0" aria-label="table">'
    yield f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>"
    for row in texts:
        cells = (
            _cell(text, side, number == coloured) for number, (text, side) in enumerate(zip(row, sides, strict=True))
        )
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _cell(text: str, side: str, is_reason: bool) -> str:
    shown = _escaped(text)
    return f"<td{side}>{_chip(text, shown)}</td>" if is_reason else f"<td{side}>{shown}</td>"


def _chip(reason: str, shown: str) -> str:
    return f'<span class="chip {css_class(reason)}">{shown}</span>'


def _is_number(text: str) -> bool:
    return text == format_value(None) or text.replace(",", "").replace(".", "", 1).isdigit()


def _commands(text: str) -> str:
    """Return text in which what stands between backquotes is set as a command."""
    parts = _escaped(text).split("`")
    if len(parts) % 2 == 0:
        return "`".join(parts)
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def _escaped(text: str) -> str:
    return html.escape(one_line(text))


def _anchor(section: Section) -> str:
    return "".join(char if char.isalnum() else "-" for char in section.title.lower())
