"""Text of a store in Markdown stays text, as a Markdown parser reads it."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from cairn.reports.text.display_tables import Table, markdown_table, markdown_text
from cairn.tasks.text.format import one_line

PARSER = MarkdownIt("gfm-like", {"html": True, "linkify": False})
HOSTILE = (
    "<script>alert(1)</script>",
    "[a link](https://example.org)",
    "![a picture](x.png)",
    "<https://example.org>",
    "# heading",
    "1. list",
    "- list",
    "+ list",
    "***bold***",
    "~~gone~~",
    "a | b | c",
    "`code` and `code",
    "```fence```",
    "\\",
    "\\`",
    "&lt;script&gt;",
    "    indented",
    "\x1b[2Jgone",
    "---",
    "===",
    "[ref]: https://example.org",
    "> quote",
)
TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=40) | st.sampled_from(HOSTILE)
MADE_OF_MARKS = st.lists(st.sampled_from([*"\\`*_{}[]()#+-.!|<>&~:=\"' \n\t1a"]), max_size=14).map("".join)


def read(markdown: str) -> str:
    """Return the text of a heading as a parser reads it, which must hold nothing but text and code."""
    tokens = PARSER.parse(f"# x{markdown}")
    assert [token.type for token in tokens] == ["heading_open", "inline", "heading_close"], tokens
    parts = tokens[1].children or []
    assert {part.type for part in parts} <= {"text", "code_inline", "text_special"}, parts
    return "".join(f"`{part.content}`" if part.type == "code_inline" else part.content for part in parts)


@given(TEXT | MADE_OF_MARKS)
def test_a_parser_reads_nothing_but_text_and_code(text: str) -> None:
    said = read(markdown_text(text)).removeprefix("x")
    plain = re.sub(r"\s+", "", html.unescape(said).replace("`", ""))
    assert plain == re.sub(r"\s+", "", one_line(text).replace("`", ""))


@given(TEXT | MADE_OF_MARKS)
def test_a_cell_of_a_table_stays_one_cell(text: str) -> None:
    tokens = PARSER.parse(markdown_table(Table(columns=("a", text or "b"), rows=((text, text), (text, text)))))
    kinds = [token.type for token in tokens]
    assert kinds.count("td_open") == 4 and kinds.count("th_open") == 2 and tokens[0].type == "table_open"
    inline = [part.type for token in tokens for part in token.children or []]
    assert set(inline) <= {"text", "code_inline", "text_special"}


@pytest.mark.parametrize("text", HOSTILE)
def test_known_attacks_are_text(text: str) -> None:
    assert "<script" not in PARSER.render(f"# {markdown_text(text)}")
