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
from tests.processes.waiting import patience_seconds, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def machines(command: Command) -> TwoMachines:
    return TwoMachines(command)


def left_with(process: "subprocess.Popen[bytes]") -> int:
    return process.wait(timeout=patience_seconds())


@pytest.mark.parametrize("architecture", ["qwen3"])
def test_a_machine_whose_ranks_are_killed_ends_no_attempt_and_both_leave_when_the_run_ends(
    machines: TwoMachines,
) -> None:
    first, other = machines.both_at_pause()
    for trainer in trainers_of(other):
        kill(trainer.pid)
    machines.command.let_go(PAUSE)
    assert [left_with(process) for process in (first, other)] == [0, 0], machines.command.output()
    assert machines.ends() == [("completed", 2, 2)]
    assert [change.lost for change in machines.command.state().member_changes if change.lost] == [(1,)]
    assert machines.command.state_sha256() == reference_run(machines.command).state_sha256


def test_a_machine_that_comes_back_joins_the_attempt_that_went_on_without_it(machines: TwoMachines) -> None:
    first, other = machines.both_at_pause("training.steps=400", "checkpoint.every_steps=50")
    kill_both(other)
    again = machines.start(1, "training.steps=400", "checkpoint.every_steps=50")
    machines.command.let_go(PAUSE)
    assert [left_with(process) for process in (first, again)] == [0, 0], machines.command.output()
    assert machines.ends() == [("completed", 2, 2)]
    lost, joined = machines.command.state().member_changes
    assert (lost.lost, lost.charged, joined.hosts) == ((1,), "lost", (socket.gethostname(),))
    assert joined.remaining == (0, *joined.joined)
    assert machines.command.state_sha256() == reference_run(machines.command).state_sha256


def test_a_machine_that_computes_other_bits_does_not_join(machines: TwoMachines) -> None:
    first, other = machines.both_at_pause("watchdog.floor_seconds=1000")
    kill_both(other)
    again = machines.start(1, ATEN_CPU_CAPABILITY="default")
    files = machines.command.folder / "cache-1"
    wait_for(
        lambda: any("computes other bits" in path.read_text() for path in files.rglob("*.stderr")), again, "its refusal"
    )
    machines.command.let_go(PAUSE)
    assert [left_with(process) for process in (first, again)] == [0, 0], machines.command.output()
    assert machines.ends() == [("completed", 2, 2)]
    assert [(change.lost, change.joined) for change in machines.command.state().member_changes] == [((1,), ())]


def test_a_spare_takes_the_place_of_a_machine_that_is_lost(machines: TwoMachines) -> None:
    more = "training.steps=400", "checkpoint.every_steps=50", "machines.spares=1"
    first, other, spare = (machines.start(rank, *more, faults=PAUSE, nodes=3) for rank in range(3))
    machines.command.wait_for_fault(PAUSE, first)
    struck = other if trainers_of(other) else spare
    kill_both(struck)
    machines.command.let_go(PAUSE)
    left = {process: left_with(process) for process in (first, other, spare) if process is not struck}
    assert set(left.values()) == {0}, machines.command.output()
    assert machines.ends() == [("completed", 2, 2)]
    assert [len(change.joined) for change in machines.command.state().member_changes] == [0, 1]


def test_an_attempt_that_is_left_with_fewer_machines_than_are_enough_ends_as_lost(machines: TwoMachines) -> None:
    rules = "machines.at_least=2", "machines.wait_seconds=5", "budgets.too-few-machines.retries=2"
    other, first = machines.start(1, "machines.wait_seconds=60"), machines.start(0, *rules, faults=PAUSE)
    machines.command.wait_for_fault(PAUSE, first)
    kill_both(other)
    assert left_with(first) == 75, machines.command.output()
    assert [left_with(machines.start(0, *rules)) for _ in range(2)] == [75, 4], machines.command.output()
    assert [reason for reason, *_ in machines.ends()] == ["lost", *("too-few-machines",) * 3]
    lost = machines.command.state().attempts[0].ended
    assert lost is not None and "1 left, machines.at_least = 2" in lost.detail
    assert machines.command.state().charges["too-few-machines"].total == 3
    assert [left_with(process) for process in machines.both()] == [0, 0], machines.command.output()
    log = RunLog(machines.command.store, RUN)
    log.refresh()
    waited = read_receipts(log, read_beat(log))[-1]
    assert waited.gathering_seconds < waited.waiting_seconds
    assert machines.command.state_sha256() == reference_run(machines.command).state_sha256


def test_the_machine_that_is_left_goes_on_alone_and_ends_with_the_same_bits(machines: TwoMachines) -> None:
    first, other = machines.both_at_pause()
    kill_both(other)
    machines.command.let_go(PAUSE)
    assert left_with(first) == 0
    assert machines.ends() == [("completed", 2, 2)]
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
