"""Nobody types the command again: watchers continue what was killed, once, with the same bits."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.crash.training_command import STEPS, Command
from tests.crash.victims import kill, kill_flow
from tests.processes.waiting import patience_seconds, wait_until

OUTPUT = re.compile(r"process (\d+), output in (.*)")


@pytest.fixture
def orphan(command: Command) -> Command:
    """A run whose flow process was killed at step 12, so that nothing is left of it on this machine."""
    kill_flow(command.train_until(12))
    return command


def looked(command: Command, *extra: str, **variables: str) -> list[dict[str, str]]:
    """Run `cairn watch --once` and return what it says it did."""
    process = command.start_verb("watch", "--once", "--json", *extra, **variables)
    assert process.wait(timeout=patience_seconds()) == 0, command.output()
    rows: list[dict[str, str]] = json.loads(command.output())
    return rows


def continued(rows: list[dict[str, str]]) -> tuple[psutil.Process, Path]:
    """Return the process that a look has started, and its output."""
    found = OUTPUT.match(rows[0]["how"])
    assert found is not None, rows
    return psutil.Process(int(found[1])), Path(found[2])


@pytest.mark.slow
def test_watchers_of_two_machines_at_once_leave_one_trainer_and_the_same_bits(
    orphan: Command, undisturbed_sha256: str, tmp_path: Path
) -> None:
    watchers = [orphan.start_verb("watch", "--once", "--json", CAIRN_CACHE=str(tmp_path / machine)) for machine in "ab"]
    assert [watcher.wait(timeout=patience_seconds()) for watcher in watchers] == [0, 0]
    outputs = [orphan.folder / f"command-{number}.txt" for number in (2, 3)]
    children = [continued(json.loads(output.read_text())) for output in outputs]
    psutil.wait_procs([child for child, _ in children], timeout=patience_seconds())
    assert orphan.state_sha256() == undisturbed_sha256
    assert orphan.reasons() == ["lost", "completed"]
    assert orphan.state().refused == ()
    said = [output.read_text() for _, output in children]
    assert sum("attempt 2 resumes" in text for text in said) == 1
    assert looked(orphan)[0]["why"] == f"finished at step {STEPS}"


@pytest.mark.slow
def test_a_loop_continues_a_run_however_often_it_is_killed_and_may_die_itself(
    orphan: Command, undisturbed_sha256: str
) -> None:
    pauses = ("pause@24", "pause@36", "pause@48")
    loop = orphan.start_verb("watch", "--every", "0.5", "--json", CAIRN_FAULTS=",".join(pauses))
    for pause in pauses[:-1]:
        orphan.wait_for_fault(pause, loop)
        kill(orphan.state().attempts[-1].started.placement.pid)
    orphan.wait_for_fault(pauses[-1], loop)
    owner_process = psutil.Process(orphan.state().attempts[-1].started.placement.pid)
    loop.kill()
    loop.wait()
    orphan.let_go(pauses[-1])
    psutil.wait_procs([owner_process], timeout=patience_seconds())
    assert orphan.state_sha256() == undisturbed_sha256
    assert len(orphan.state().attempts) == 4
    assert looked(orphan)[0]["action"] == "left"


@pytest.mark.slow
def test_a_preempted_run_is_continued_and_an_interrupted_one_is_left(command: Command, undisturbed_sha256: str) -> None:
    process = command.train_until(8)
    assert looked(command)[0]["why"].endswith("is alive")
    process.terminate()
    assert process.wait(timeout=patience_seconds()) == 75
    child, _ = continued(looked(command, CAIRN_FAULTS="pause@20"))
    wait_until(lambda: command.has_met("pause@20"), "step 20")
    child.send_signal(signal.SIGINT)
    psutil.wait_procs([child], timeout=patience_seconds())
    rows = looked(command)
    assert rows[0]["action"] == "left" and "a person stopped it" in rows[0]["why"]
    command.train()
    assert command.state_sha256() == undisturbed_sha256
