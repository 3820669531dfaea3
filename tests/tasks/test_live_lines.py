import io

from rich.console import Console

from cairn.tasks.text.live_lines import LiveLines


def test_seconds_are_counted_on_a_terminal_from_when_the_words_are_given() -> None:
    screen, now = io.StringIO(), [100.0]
    lines = LiveLines(Console(file=screen, force_terminal=True, width=60), stays=True)
    lines.count_seconds("waiting …", clock=lambda: now[0])
    now[0] = 107.2
    with lines.show():
        assert lines.are_shown
    assert "waiting … 7 s" in screen.getvalue()


def test_without_a_terminal_no_seconds_are_shown() -> None:
    screen = io.StringIO()
    lines = LiveLines(Console(file=screen), stays=True)
    lines.count_seconds("waiting …")
    with lines.show():
        pass
    assert not lines.can_be_shown and screen.getvalue() == ""
