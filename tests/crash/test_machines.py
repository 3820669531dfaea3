"""Two machines, which are two commands here: whichever is taken away or told to leave, none waits without a limit."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from cairn.reports.queries.receipts import read_receipts
from cairn.reports.queries.run_lookup import read_beat
from cairn.storage.logs.run_log import RunLog
from tests.crash.reference import reference_run
from tests.crash.training_command import RUN, Command
from tests.crash.two_machines import PAUSE, TwoMachines
from tests.crash.victims import kill, kill_both, trainers_of
from tests.processes.waiting import patience_seconds

pytestmark = pytest.mark.slow


@pytest.fixture
def machines(command: Command) -> TwoMachines:
    return TwoMachines(command)


def left_with(process: "subprocess.Popen[bytes]") -> int:
    return process.wait(timeout=patience_seconds())


@pytest.mark.parametrize("architecture", ["qwen3"])
def test_a_machine_whose_ranks_are_killed_takes_part_in_the_next_attempt_and_both_leave_when_the_run_ends(
    machines: TwoMachines,
) -> None:
    first, other = machines.both_at_pause()
    for trainer in trainers_of(other):
        kill(trainer.pid)
    machines.command.let_go(PAUSE)
    assert [left_with(process) for process in (first, other)] == [0, 0], machines.command.output()
    assert machines.ends() == [("lost", 2, 2), ("completed", 2, 2)]
    assert machines.command.state_sha256() == reference_run(machines.command).state_sha256


def test_each_wait_for_a_machine_that_does_not_come_is_charged_to_a_budget_of_its_own_until_that_is_spent(
    machines: TwoMachines,
) -> None:
    rules = "machines.wait_seconds=1", "budgets.too-few-machines.retries=2"
    first, other = machines.both_at_pause(*rules)
    kill_both(other)
    machines.command.let_go(PAUSE)
    assert left_with(first) == 75
    assert [left_with(machines.start(0, *rules)) for _ in range(2)] == [75, 4], machines.command.output()
    assert [reason for reason, *_ in machines.ends()] == ["lost", *("too-few-machines",) * 3]
    state = machines.command.state()
    assert {reason: charges.total for reason, charges in state.charges.items()} == {"lost": 1, "too-few-machines": 3}
    assert [left_with(process) for process in machines.both()] == [0, 0], machines.command.output()
    log = RunLog(machines.command.store, RUN)
    log.refresh()
    waited = read_receipts(log, read_beat(log))[-1]
    assert waited.gathering_seconds < waited.waiting_seconds
    assert machines.command.state_sha256() == reference_run(machines.command).state_sha256


def test_a_run_that_may_goes_on_with_the_machine_that_is_left_and_ends_with_the_same_bits(
    machines: TwoMachines,
) -> None:
    first, other = machines.both_at_pause("machines.wait_seconds=1", "machines.at_least=1")
    kill_both(other)
    machines.command.let_go(PAUSE)
    assert left_with(first) == 0
    assert machines.ends() == [("lost", 2, 2), ("completed", 1, 2)]
    assert machines.command.state().attempts[1].started.gathering_seconds >= 1
    assert machines.command.state_sha256() == reference_run(machines.command).state_sha256


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_machine_leaves_at_a_notice_while_it_waits_for_the_other(
    machines: TwoMachines, number: signal.Signals
) -> None:
    first = machines.start(0, "machines.wait_seconds=1000000", "checkpoint.grace_seconds=1000000")
    machines.wait_until_says(1, "waits for", first)
    first.send_signal(number)
    assert left_with(first) == {signal.SIGTERM: 75, signal.SIGINT: 130}[number]
    assert machines.ends() == []


def test_another_machine_leaves_at_a_notice_while_it_waits_for_the_first(machines: TwoMachines, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    waiting = f"preemption.notice_file={notice}", "preemption.poll_seconds=0.1"
    other = machines.start(1, *waiting)
    machines.wait_until_says(1, "waits for", other)
    notice.touch()
    assert left_with(other) == 75


def test_another_machine_leaves_with_75_when_the_first_does_not_come(machines: TwoMachines) -> None:
    first, other = machines.both_at_pause("machines.wait_seconds=1")
    kill_both(first)
    assert left_with(other) == 75


def test_a_notice_to_another_machine_stops_both_behind_the_same_step_and_commits_it(machines: TwoMachines) -> None:
    first, other = machines.both_at_pause()
    other.terminate()
    machines.command.let_go(PAUSE)
    assert [left_with(process) for process in (first, other)] == [75, 75]
    (ended,) = machines.command.receipts()
    assert (ended.reason, ended.last_step) == ("preempted", machines.command.state().resume_step)


def test_a_machine_that_is_lost_before_training_begins_ends_the_attempt_as_lost(machines: TwoMachines) -> None:
    first, other = machines.both(faults="pause-load@1")
    machines.command.wait_for_fault("pause-load@1", first)
    for trainer in trainers_of(other):
        kill(trainer.pid)
    assert [left_with(process) for process in (first, other)] == [0, 0], machines.command.output()
    assert machines.ends() == [("lost", 2, 2), ("completed", 2, 2)]
    assert machines.command.receipts()[0].detail.endswith(f"{socket.gethostname()}, ended with exit code 1")
