"""How long a machine that is not the first one waits for it, how often it asks, and with which code it leaves."""

from pathlib import Path

import pytest

from cairn.flows.run import node_service
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.policy.termination import ExitCode
from cairn.tasks.trainer.trainer_group import TrainerGroup
from tests.fabricated_run import FabricatedRun, configuration, fabricate
from tests.memory_store import MemoryStore
from tests.tasks.slept_clock import Clock

OPENING_SECONDS = 900


class AbsentMachine:
    """The first machine, which does not answer; notes when it was asked."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.asked = clock, list[float]()

    def connect(self, address: str, secret: bytes, node_rank: int) -> None:
        self.asked.append(self._clock.now)
        assert len(self.asked) <= 3 * OPENING_SECONDS, "it asks without a pause"


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> AbsentMachine:
    clock = Clock()
    first = AbsentMachine(clock)
    monkeypatch.setenv("CAIRN_RENDEZVOUS_SECRET", "0123456789abcdef")
    monkeypatch.setattr(node_service, "time", clock)
    monkeypatch.setattr(node_service.machines, "connect", first.connect)
    return first


@pytest.fixture
def run() -> FabricatedRun:
    return fabricate(MemoryStore("machines"), "bard")


def serve(log: RunLog, folder: Path, wait_seconds: int) -> ExitCode:
    config = configuration((f"machines.wait_seconds={wait_seconds}",))
    group = TrainerGroup(nodes=2, node_rank=1, rendezvous="first:1")
    return node_service.NodeService(log, config, group, folder, say=lambda words: None).run()


def half_seconds(seconds: int) -> list[float]:
    return [moment / 2 for moment in range(2 * seconds + 2)]


def test_it_asks_twice_a_second_and_leaves_with_75_when_its_time_is_over(
    run: FabricatedRun, first: AbsentMachine, tmp_path: Path
) -> None:
    assert serve(run.log, tmp_path, wait_seconds=30) == ExitCode.PREEMPTED
    assert first.asked == half_seconds(30)


def test_before_the_run_is_opened_the_first_machine_has_time_to_read_the_text(
    first: AbsentMachine, tmp_path: Path
) -> None:
    assert serve(RunLog(MemoryStore("machines"), "bard"), tmp_path, wait_seconds=30) == ExitCode.PREEMPTED
    assert first.asked == half_seconds(OPENING_SECONDS)


def test_it_leaves_with_0_when_the_run_has_ended_meanwhile(
    run: FabricatedRun, first: AbsentMachine, tmp_path: Path
) -> None:
    run.start()
    run.complete()
    assert serve(run.log, tmp_path, wait_seconds=30) == ExitCode.DONE
    assert first.asked == [0.0]
