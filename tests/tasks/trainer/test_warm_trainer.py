"""A trainer that waits for its spec: at most one, never a dead one, and none is left if the run does not begin."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cairn.model.estimates.numerics import MachineSpeed
from cairn.tasks.policy.failures import ORPHANED_EXIT_CODE
from cairn.tasks.trainer import trainer_channel, trainer_process
from cairn.tasks.trainer.trainer_process import TrainerChild, WarmTrainer
from cairn.tasks.trainer.trainer_protocol import encode_message
from tests.processes.fork_server import fork_server

SAYS_SO_AND_WAITS = "import sys; print('here', file=sys.stderr, flush=True); print('there', flush=True); input()"
start_quickly = partial(TrainerChild, command=(sys.executable, "-S", "-c", SAYS_SO_AND_WAITS))


@pytest.fixture
def waiting() -> Iterator[WarmTrainer]:
    trainer = WarmTrainer(start_quickly)
    yield trainer
    trainer.close()


def heard(child: TrainerChild) -> bytes:
    assert child.process.stdout is not None
    return child.process.stdout.readline()


def test_beginning_twice_starts_one(waiting: WarmTrainer, tmp_path: Path) -> None:
    waiting.start(tmp_path)
    waiting.start(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_one_that_waits_is_the_one_that_is_taken(waiting: WarmTrainer, tmp_path: Path) -> None:
    waiting.start(tmp_path)
    before = {child.pid for child in psutil.Process().children()}
    child = waiting.acquire(tmp_path)
    assert child.process.pid in before
    child.discard()


def test_where_none_waits_a_new_one_is_taken(waiting: WarmTrainer, tmp_path: Path) -> None:
    child = waiting.acquire(tmp_path / "made")
    assert heard(child) == b"there\n"
    child.discard()


def test_one_that_cannot_measure_is_discarded_and_nothing_is_known(waiting: WarmTrainer, tmp_path: Path) -> None:
    assert waiting.measure_speed(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_one_that_has_waited_for_so_long_that_it_may_exit_is_not_taken(
    waiting: WarmTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting.start(tmp_path)
    assert waiting._child is not None
    before = waiting._child.process
    monkeypatch.setattr(trainer_process, "ORDER_SECONDS", 0.0)
    child = waiting.acquire(tmp_path)
    assert child.process.pid != before.pid and before.poll() is not None
    child.discard()


def test_a_trainer_that_is_given_nothing_to_do_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as stdin, open(writing, "wb"):
        monkeypatch.setattr(trainer_channel, "ORDER_SECONDS", 0.0)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stdin))
        monkeypatch.setattr(os, "_exit", sys.exit)
        with pytest.raises(SystemExit) as left:
            object.__new__(trainer_channel.ParentChannel).read_spec()
    assert left.value.code == ORPHANED_EXIT_CODE


@pytest.mark.slow  # the test below is quick
def test_a_waiting_trainer_measures_the_machine_and_takes_its_spec_afterwards(tmp_path: Path) -> None:
    trainer = WarmTrainer()
    speed = trainer.measure_speed(tmp_path)
    assert speed is not None and speed.cpu_half_gain > 0
    child = trainer.acquire(tmp_path)
    child.process.communicate()
    assert child.process.returncode == ORPHANED_EXIT_CODE
    child.discard()


def test_an_answer_about_the_machine_is_taken_from_the_one_that_waits(tmp_path: Path) -> None:
    answer = encode_message(MachineSpeed(cpu_half_gain=2.5)).decode()
    says = f"input(); print({answer!r}, end='', flush=True); input()"
    trainer = WarmTrainer(partial(TrainerChild, command=(sys.executable, "-S", "-c", says)))
    assert trainer.measure_speed(tmp_path) == MachineSpeed(cpu_half_gain=2.5)
    trainer.close()


def test_one_that_died_waiting_is_not_taken(waiting: WarmTrainer, tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    waiting.start(tmp_path)
    (dead,) = set(psutil.Process().children()) - before
    dead.kill()
    psutil.wait_procs([dead])
    child = waiting.acquire(tmp_path)
    assert child.process.pid != dead.pid and heard(child) == b"there\n"
    child.discard()


def test_one_that_is_taken_is_no_longer_the_one_that_waits(waiting: WarmTrainer, tmp_path: Path) -> None:
    child = waiting.acquire(tmp_path)
    waiting.close()
    assert child.process.poll() is None
    child.discard()


def test_what_it_said_while_it_waited_is_kept_under_the_attempts_name(waiting: WarmTrainer, tmp_path: Path) -> None:
    child = waiting.acquire(tmp_path)
    heard(child)
    child.move_stderr(tmp_path / "attempt-0007.stderr")
    assert child.stderr_path.read_text() == "here\n"
    assert [path.name for path in tmp_path.iterdir()] == ["attempt-0007.stderr"]
    child.discard()


def test_the_end_of_the_block_leaves_neither_process_nor_file(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(KeyError), closing(WarmTrainer()) as trainer:
        trainer.start(tmp_path)
        (child,) = set(psutil.Process().children()) - before
        raise KeyError("whatever kept the run from beginning")
    assert not child.is_running() and list(tmp_path.iterdir()) == []


@pytest.mark.linux  # forked
def test_a_trainer_without_a_spec_exits_when_its_stdin_closes(tmp_path: Path) -> None:
    with fork_server().forking():
        child = TrainerChild(tmp_path)
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert child.process.wait(timeout=240) == ORPHANED_EXIT_CODE
    assert child.stderr_path.read_text() == ""
    child.discard()
