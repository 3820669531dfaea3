import io

import pytest
from rich.console import Console

from cairn.tasks.text.live_lines import LiveLines, console_of


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
