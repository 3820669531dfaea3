import io

from rich.console import Console

from cairn.tasks.text.live_lines import LiveLines


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
        pass
    assert not lines.can_be_shown and screen.getvalue() == ""
