"""What is shown of a run while it trains, and of many runs while they are watched: lines, bars and times left."""

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from cairn.reports.text.progress import Progress, RunProgress, TextProgress, read_progress, showing_progress
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.step_log import Heartbeat, StepRecord, write_heartbeat
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data.snapshot_build import BuildProgress, BuildStage
from cairn.tasks.text.format import format_bar, format_clock
from tests.entries import placement, step_record
from tests.fabricated_run import FabricatedRun, fabricate


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ClosedTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def done(step: int, **changes: Any) -> StepRecord:
    return step_record(step, 1, train_loss=2.5, tokens_per_second=1000.0, **changes)


def console_of(screen: io.StringIO, *, terminal: bool = False, width: int = 200) -> Console:
    return Console(file=screen, force_terminal=terminal, width=width, color_system=None, legacy_windows=False)


def shown(steps: Sequence[int], *, screen: io.StringIO | None = None, width: int = 200, terminal: bool = False) -> str:
    """What is written when each step takes two seconds."""
    clock, screen = Clock(), screen or io.StringIO()
    progress = Progress(100, clock=clock, console=console_of(screen, terminal=terminal, width=width))
    with progress.showing():
        for step in steps:
            clock.now += 2.0
            progress.step(done(step))
    return "" if isinstance(screen, ClosedTerminal) else screen.getvalue()


def last_line(text: str) -> str:
    """The line as it stands at the end, without what only steers the terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").strip().split("\n")[-1]


def test_without_a_terminal_there_is_a_line_every_ten_seconds() -> None:
    assert shown(range(1, 13)).splitlines() == [
        "step 1/100 (1 %) · loss 2.500 · 1,000 tokens/s · ETA –",
        "step 6/100 (6 %) · loss 2.500 · 1,000 tokens/s · ETA 3:08",
        "step 11/100 (11 %) · loss 2.500 · 1,000 tokens/s · ETA 2:58",
    ]


def test_after_a_restart_time_is_left_by_the_new_attempt_alone() -> None:
    clock = Clock()
    progress = Progress(100, clock=clock, console=console_of(io.StringIO()))
    for step, clock.now in ((48, 0.0), (49, 1.0), (31, 500.0), (32, 502.0)):
        progress.step(done(step))
    assert progress.pace().endswith(f"ETA {format_clock(136.0)}")


def test_a_terminal_has_one_line_with_a_bar_and_the_time_left() -> None:
    line = last_line(shown(range(1, 51), terminal=True))
    assert line == f"{'━' * 10}{'─' * 10} step 50/100 (50 %) · loss 2.500 · 1,000 tokens/s · ETA 1:40"


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (78, "━━━━━━━━━───────── step 50/100 (50 %) · loss 2.500 · 1,000 tokens/s · ETA 1:40"),
        (60, "step 50/100 (50 %) · loss 2.500 · 1,000 tokens/s · ETA 1:40"),
        (50, "━━━──── step 50/100 (50 %) · loss 2.500 · ETA 1:40"),
        (30, "step 50/100 (50 %) · ETA 1:40"),
        (20, "step 50/100 (50 %)"),
        (9, "step 50/…"),
    ],
)
def test_a_narrow_terminal_loses_the_bar_then_the_speed_then_the_loss(width: int, line: str) -> None:
    found = last_line(shown(range(1, 51), width=width, terminal=True))
    assert found == line


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(range(1, 5), terminal=True)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in shown(range(1, 5), terminal=True).replace("\x1b[?25", "")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_closed_terminal_costs_the_words_and_nothing_else(terminal: bool) -> None:
    shown(range(1, 20), screen=ClosedTerminal(), terminal=terminal)


def test_a_probe_stays_on_the_screen_in_one_line() -> None:
    screen = io.StringIO()
    progress = Progress(100, clock=Clock(), console=console_of(screen))
    progress.step(done(7, probe_loss=3.25, sample="a b\n  c"))
    assert "  probe of the held-out text at step 7: loss 3.250 · 'a b c'\n" in screen.getvalue()


def beside(*, terminal: bool, width: int = 200) -> str:
    """What is written when an evaluation and a wait begin after the last step, and the first says how far it is."""
    clock, screen = Clock(), io.StringIO()
    progress = Progress(100, clock=clock, console=console_of(screen, terminal=terminal, width=width))
    with progress.doing("evaluating step 100") as note, progress.doing("waiting for the store"), progress.showing():
        progress.step(done(100))
        for share in (0.1, 0.25, 0.4):
            clock.now += 6.0
            note(share)
    return screen.getvalue()


@pytest.mark.parametrize("width", [200, 60])
def test_what_goes_on_beside_the_steps_stands_below_them(width: int) -> None:
    assert last_line(beside(terminal=True, width=width)) == "evaluating step 100, 40 % · waiting for the store"


def test_without_a_terminal_what_goes_on_is_said_every_ten_seconds() -> None:
    line = "step 100/100 (100 %) · loss 2.500 · 1,000 tokens/s · ETA –"
    first, second = beside(terminal=False).splitlines()
    assert first == f"{line} · evaluating step 100 · waiting for the store"
    assert second == f"{line} · evaluating step 100, 25 % · waiting for the store"


def test_what_has_ended_is_not_shown_any_more() -> None:
    screen = io.StringIO()
    progress = Progress(100, clock=Clock(), console=console_of(screen, terminal=True))
    with progress.showing():
        with progress.doing("starting the trainer"):
            pass
        progress.step(done(7))
    assert last_line(screen.getvalue()).endswith("ETA –")


def test_a_listener_that_fails_costs_nothing() -> None:
    def fail(message: str) -> None:
        raise RuntimeError(message)

    screen = io.StringIO()
    Progress(100, echo=fail, console=console_of(screen)).say("committed")
    assert screen.getvalue() == "committed\n"


def told(stage: BuildStage, megabytes: int, documents: int = 0) -> BuildProgress:
    return BuildProgress(stage=stage, bytes_done=megabytes * 1_000_000, bytes_total=100_000_000, documents=documents)


def shown_of_text(*, terminal: bool) -> str:
    """What is written while two megabytes a second are tokenized."""
    clock, screen = Clock(), io.StringIO()
    progress = TextProgress(clock=clock, console=console_of(screen, terminal=terminal))
    with progress.showing():
        for second in range(31):
            clock.now = float(second)
            progress(told(BuildStage.TOKENIZING, 2 * second, 10 * second))
    return screen.getvalue()


def test_text_has_a_line_every_ten_seconds_and_on_a_terminal_a_bar() -> None:
    assert shown_of_text(terminal=False).splitlines() == [
        "tokenizing text 20 % · 20 MB of 100 MB · 100 documents · 2 MB/s · ETA 0:40",
        "tokenizing text 40 % · 40 MB of 100 MB · 200 documents · 2 MB/s · ETA 0:30",
        "tokenizing text 60 % · 60 MB of 100 MB · 300 documents · 2 MB/s · ETA 0:20",
    ]
    assert "━" in shown_of_text(terminal=True)


def test_speed_is_counted_from_where_a_stage_began() -> None:
    clock, screen = Clock(), io.StringIO()
    progress = TextProgress(clock=clock, console=console_of(screen))
    progress(told(BuildStage.TOKENIZING, 50))
    clock.now = 10.0
    progress(told(BuildStage.TOKENIZING, 60))
    assert screen.getvalue().strip() == "tokenizing text 60 % · 60 MB of 100 MB · 1 MB/s · ETA 0:40"


@pytest.mark.parametrize(
    ("seconds", "words"), [(None, "–"), (0.4, "0:00"), (40, "0:40"), (725, "12:05"), (10_809, "3:00:09")]
)
def test_time_is_written_as_a_clock_does(seconds: float | None, words: str) -> None:
    assert format_clock(seconds) == words


@pytest.mark.parametrize(("share", "drawn"), [(-1, "────"), (0.5, "━━──"), (7, "━━━━")])
def test_a_bar_is_never_longer_than_it_may_be(share: float, drawn: str) -> None:
    assert format_bar(share, 4) == drawn


def beat(run: FabricatedRun, attempt: int, step: int, gpu_seconds: float) -> None:
    heartbeat = Heartbeat(attempt=attempt, beat=1, step=step, train_loss=2.5, tokens=1, gpu_seconds=gpu_seconds)
    write_heartbeat(run.log.store, run.log.prefix, heartbeat)


def read(run: FabricatedRun) -> RunProgress | None:
    log = RunLog(run.log.store, run.log.run_id)
    log.refresh()
    return read_progress(log)


@pytest.fixture
def run(store: LocalStore) -> FabricatedRun:
    return fabricate(store, "bard")


def test_a_pulse_is_how_far_the_heartbeat_is_and_how_long_the_rest_takes_at_its_speed(run: FabricatedRun) -> None:
    run.start()
    run.commit(10)
    run.end("preempted", action="resume")
    run.start(placement=placement(device="cuda", world_size=1))
    beat(run, 2, 20, 50.0)
    progress = read(run)
    assert progress is not None and progress.step == 20
    what = "ten steps since it resumed took fifty seconds"
    assert progress.line == "bard: step 20/40 (50 %) · loss 2.500 · attempt 2 · ETA 1:40", what


@pytest.mark.parametrize(
    ("ranks", "step", "gpu_seconds", "left"),
    [
        pytest.param(
            4, 10, 40.0, "0:30", id="of several ranks it is not multiplied: four took ten seconds for ten steps"
        ),
        pytest.param(1, 0, 0.0, "–", id="before the first step it is not known"),
    ],
)
def test_the_time_left(run: FabricatedRun, ranks: int, step: int, gpu_seconds: float, left: str) -> None:
    run.start(placement=placement(device="cuda", world_size=ranks))
    beat(run, 1, step, gpu_seconds)
    progress = read(run)
    assert progress is not None and progress.line.endswith(f"ETA {left}")


def test_a_run_nobody_trains_has_no_pulse(run: FabricatedRun) -> None:
    assert read(run) is None
    run.start()
    assert read(run) is None, "no heartbeat yet"
    beat(run, 1, 3, 1.0)
    run.end("preempted", action="resume")
    assert read(run) is None


def running(*steps: int) -> Sequence[RunProgress]:
    return [
        RunProgress(run_id=f"run-{number}", step=step, line=f"run-{number}: step {step}/100")
        for number, step in enumerate(steps)
    ]


def test_elsewhere_than_on_a_terminal_a_run_that_moved_has_a_line_at_most_once_a_minute() -> None:
    now, said = [0.0], list[str]()
    with showing_progress(said.append, clock=lambda: now[0], console=Console(file=io.StringIO())) as show:
        for at, steps in ((0.0, (1, 5)), (30.0, (2, 5)), (60.0, (3, 5)), (120.0, (3, 6))):
            now[0] = at
            show(running(*steps))
    assert said == ["run-0: step 1/100", "run-1: step 5/100", "run-0: step 3/100", "run-1: step 6/100"]


def test_on_a_terminal_the_lines_are_renewed_in_place_and_gone_at_the_end() -> None:
    screen, said = io.StringIO(), list[str]()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None, legacy_windows=False)
    with showing_progress(said.append, console=console) as show:
        show(running(1, 2))
    assert "run-0: step 1/100" in screen.getvalue() and said == []
    assert screen.getvalue().rstrip().endswith("\x1b[2K"), "wiped"
