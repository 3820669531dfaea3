import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from cairn.reports.text.progress import RunProgress, read_progress, showing_progress
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.step_log import Heartbeat, write_heartbeat
from cairn.storage.stores.local_store import LocalStore
from tests.entries import placement
from tests.fabricated_run import FabricatedRun, fabricate


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
