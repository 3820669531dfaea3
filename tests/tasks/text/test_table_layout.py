"""Tables, text and live lines on a terminal: words stay whole, and what has no room stands below its row."""

import io

import pytest
from rich.console import Console

from cairn.tasks.text.live_lines import LiveLines, console_of
from cairn.tasks.text.output import lay_out, wrap, wrap_beside

COLUMNS = ("step", "state", "committed (UTC)", "why")
ROW = ("10", "deleted", "2026-01-01 12:00:00", "older than the newest 3, and val_loss 5.426 is not the best 1")


def lines(width: int) -> list[str]:
    return [line for part in lay_out(COLUMNS, [ROW], width) for line in part]


def test_a_table_with_room_has_one_line_a_row() -> None:
    assert lines(120) == [f"step  state    {COLUMNS[2]}      why", f"10    deleted  {ROW[2]}  {ROW[3]}"]


def test_long_text_is_wrapped_at_words() -> None:
    assert lines(70)[1:] == [
        "10    deleted  2026-01-01 12:00:00  older than the newest 3, and",
        "                                    val_loss 5.426 is not the best 1",
    ]


def test_a_column_without_room_stands_below_its_row_with_its_name() -> None:
    assert lines(50)[1:] == [
        "10    deleted  2026-01-01 12:00:00",
        "    why: older than the newest 3, and val_loss",
        "    5.426 is not the best 1",
    ]


def test_narrow_gaps_come_before_lines_below() -> None:
    assert list(lay_out(("a", "b"), [("x" * 5, "y" * 4)], 10)) == [("a     b",), ("xxxxx yyyy",)]


def test_an_empty_cell_without_room_is_not_named() -> None:
    assert list(lay_out(("a", "b", "name"), [("x" * 5, "–", "–")], 8))[1] == ("xxxxx  –",)


def test_a_word_wider_than_the_terminal_is_not_broken() -> None:
    assert wrap(f"see {'x' * 30} there", 10) == ["see", "x" * 30, "there"]


def test_a_command_between_backticks_stays_on_one_line() -> None:
    assert wrap("it is late: `cairn train it` goes on", 20) == ["it is late:", "`cairn train it`", "goes on"]


def test_a_wide_character_takes_two_cells() -> None:
    assert wrap("石石 石石", 8) == ["石石", "石石"]


def test_text_beside_a_label_stays_beside_it() -> None:
    assert wrap_beside("why", "one two three", start=5, width=13) == ["why  one two", "     three"]


def test_lines_are_on_a_terminal_while_the_block_runs() -> None:
    screen = io.StringIO()
    lines = LiveLines(Console(file=screen, force_terminal=True, width=60), stays=True)
    lines.write(["waiting …"])
    with lines.show():
        assert lines.are_shown
    assert "waiting …" in screen.getvalue() and not lines.are_shown


def test_without_a_terminal_nothing_is_shown() -> None:
    screen = io.StringIO()
    lines = LiveLines(Console(file=screen), stays=True)
    lines.write(["waiting …"])
    with lines.show():
        assert not lines.are_shown
    assert screen.getvalue() == ""


def test_a_stream_that_is_no_terminal_has_none_whatever_is_asked_for_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):  # as a notebook's kernel and CI set them
        monkeypatch.setenv(name, "1")
    assert not console_of(io.StringIO()).is_terminal
