import io

from rich.console import Console

from cairn.flows.run.progress import TextProgress
from cairn.tasks.data.snapshot_build import BuildProgress, BuildStage


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def told(stage: BuildStage, megabytes: int, documents: int = 0) -> BuildProgress:
    return BuildProgress(stage=stage, bytes_done=megabytes * 1_000_000, bytes_total=100_000_000, documents=documents)


def shown(*, terminal: bool) -> str:
    clock, screen = Clock(), io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=200, color_system=None)
    progress = TextProgress(clock=clock, console=console)
    with progress.showing():
        for second in range(31):
            clock.now = float(second)
            progress(told(BuildStage.TOKENIZING, 2 * second, 10 * second))
    return screen.getvalue()


def test_without_a_terminal_there_is_a_line_every_ten_seconds() -> None:
    assert shown(terminal=False).splitlines() == [
        "tokenizing text 20 % · 20 MB of 100 MB · 100 documents · 2 MB/s · ETA 0:40",
        "tokenizing text 40 % · 40 MB of 100 MB · 200 documents · 2 MB/s · ETA 0:30",
        "tokenizing text 60 % · 60 MB of 100 MB · 300 documents · 2 MB/s · ETA 0:20",
    ]


def test_on_a_terminal_there_is_a_bar() -> None:
    assert "━" in shown(terminal=True)


def test_speed_is_counted_from_where_a_stage_began() -> None:
    clock, screen = Clock(), io.StringIO()
    progress = TextProgress(clock=clock, console=Console(file=screen, width=200))
    progress(told(BuildStage.TOKENIZING, 50))
    clock.now = 10.0
    progress(told(BuildStage.TOKENIZING, 60))
    assert screen.getvalue().strip() == "tokenizing text 60 % · 60 MB of 100 MB · 1 MB/s · ETA 0:40"
