"""Evaluators that die, hang, flood and leave children behind, as real processes."""

import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from cairn.tasks.errors import EvaluationInterrupted
from cairn.tasks.evaluator import evaluator_process
from cairn.tasks.evaluator.evaluator_process import Outcome, run_evaluator
from tests.processes.waiting import wait_until

PATIENCE_SECONDS = 240.0
LEAVE_A_CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
note = pathlib.Path({note!r})
note.with_suffix(".part").write_text(str(child.pid))
note.with_suffix(".part").rename(note)
{then}
"""


def ran(code: str, *, spec: bytes = b"", timeout_seconds: float = PATIENCE_SECONDS) -> Outcome:
    return run_evaluator(spec, timeout_seconds, command=(sys.executable, "-c", code))


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_what_it_prints_is_the_result_and_what_it_reads_the_spec() -> None:
    assert ran("print(input().upper())", spec=b"spec\n") == Outcome(result=b"SPEC", problem="")


def test_what_it_has_done_is_said_while_it_works_and_is_no_part_of_the_result(tmp_path: Path) -> None:
    said, shares = tmp_path / "said", list[float]()

    def note(share: float) -> None:
        shares.append(share)
        said.touch()

    code = f"""
import os, time
print("not a number"), print(0.25, flush=True)
while not os.path.exists({str(said)!r}): time.sleep(0.01)
print("{{}}")
"""
    outcome = run_evaluator(b"", PATIENCE_SECONDS, note=note, command=(sys.executable, "-c", code))
    assert (outcome.result, set(shares)) == (b"{}", {0.25})


def test_an_exit_is_a_problem_with_the_last_words() -> None:
    outcome = ran("import sys; print('first', file=sys.stderr); sys.exit('no such weights')")
    assert outcome == Outcome(result=b"", problem="the evaluator exited with 1: no such weights")


def test_a_signal_is_a_problem() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert ran(code).problem == "the evaluator exited with -9: nothing on stderr"


def test_silence_is_a_problem() -> None:
    outcome = ran("import signal; signal.pause()", timeout_seconds=0.5)
    assert outcome.problem == "the evaluator did not answer within 0.5 s"


def test_a_program_that_is_not_there_is_a_problem() -> None:
    assert "could not be started" in run_evaluator(b"", 1.0, command=("no-such-program-anywhere",)).problem


def test_a_flood_ends_it_and_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator_process, "MOST_STDOUT_BYTES", 100_000)
    assert "more than 100,000 bytes" in ran("import os\nwhile True: os.write(1, b'x' * 65536)").problem


def test_a_flood_on_stderr_is_harmless() -> None:
    code = "import os\nfor _ in range(200): os.write(2, b'x' * 65536 + b'\\n')\nprint('fine')"
    assert ran(code) == Outcome(result=b"fine", problem="")


def test_a_spec_that_is_not_read_does_not_block() -> None:
    assert ran("print('done')", spec=b"x" * 10_000_000).result == b"done"


@pytest.mark.parametrize(
    ("then", "timeout_seconds"),
    [
        pytest.param("time.sleep(600)", 2.0, id="hangs"),
        pytest.param("sys.exit(3)", PATIENCE_SECONDS, id="exits"),
        pytest.param("print('{}')", PATIENCE_SECONDS, id="is done"),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", PATIENCE_SECONDS, id="is killed"),
    ],
)
def test_what_it_started_ends_with_it(tmp_path: Path, then: str, timeout_seconds: float) -> None:
    note = tmp_path / "pid"
    ran(LEAVE_A_CHILD.format(note=str(note), then=then), timeout_seconds=timeout_seconds)
    pid = int(note.read_text())
    wait_until(lambda: not is_running(pid), "the child's end")


def test_one_that_is_told_to_stop_is_ended_and_nobody_failed(tmp_path: Path) -> None:
    note, stop = tmp_path / "pid", threading.Event()
    threading.Thread(target=lambda: (wait_until(note.exists, "its start"), stop.set())).start()
    code = LEAVE_A_CHILD.format(note=str(note), then="time.sleep(600)")
    with pytest.raises(EvaluationInterrupted):
        run_evaluator(b"", PATIENCE_SECONDS, stopping=stop.is_set, command=(sys.executable, "-c", code))
    wait_until(lambda: not is_running(int(note.read_text())), "the child's end")


def test_an_exception_in_the_parent_ends_it_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def interrupted() -> bool:
        if note.exists():
            raise KeyboardInterrupt
        return False

    code = LEAVE_A_CHILD.format(note=str(note), then="time.sleep(600)")
    with pytest.raises(KeyboardInterrupt):
        run_evaluator(b"", PATIENCE_SECONDS, stopping=interrupted, command=(sys.executable, "-c", code))
    wait_until(lambda: not is_running(int(note.read_text())), "the child's end")


GUARDED = (
    """
import pathlib, subprocess, sys, time
from cairn.storage.stores.child_process import guard_group
guard = guard_group()
"""
    + LEAVE_A_CHILD
)


def test_the_guard_ends_the_group_when_the_evaluator_is_killed_and_nobody_else_is_there(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = GUARDED.format(note=str(note), then="time.sleep(600)")
    evaluator = psutil.Popen([sys.executable, "-c", code], start_new_session=True, stderr=-3)
    try:
        wait_until(note.exists, "its start")
        os.kill(evaluator.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(int(note.read_text())), "the child's end")
    finally:
        evaluator.wait()
