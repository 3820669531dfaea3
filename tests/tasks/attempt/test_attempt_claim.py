import pytest

from cairn.storage.logs.log_entry import DevicePeak, Writer
from cairn.storage.logs.run_entries import AttemptStarted
from cairn.storage.logs.run_log import RunLog
from cairn.tasks.attempt.attempt_entries import Claimant, claim_attempt
from cairn.tasks.attempt.injected_faults import FaultKind, FaultPlan
from cairn.tasks.configuration.settings import BudgetsConfig, LeaseConfig
from cairn.tasks.errors import LiveOwner
from tests import entries
from tests.entries import NOON
from tests.fabricated_run import FabricatedRun, fabricate
from tests.memory_store import MemoryStore
from tests.tasks.slept_clock import Clock


@pytest.fixture
def owned() -> FabricatedRun:
    """A run whose attempt runs on another host."""
    run = fabricate(MemoryStore("claims"), "bard")
    run.start()
    run.beat(3)
    return run


def claim(run: FabricatedRun, clock: Clock) -> AttemptStarted:
    claimant = Claimant(
        lease=LeaseConfig(seconds=3.0, heartbeat_seconds=0.3),
        budgets=BudgetsConfig(),
        writer=Writer(host="here", pid=2),
        monotonic=clock.monotonic,
        sleep=clock.sleep,
    )
    template = run.log.state.attempts[-1].started
    return claim_attempt(
        RunLog(run.log.store, "bard"),
        claimant,
        lambda number, reference, state: entries.started(
            number,
            placement=template.placement,
            config=template.config,
            config_sha256=template.config_sha256,
            micro_batch=2,
            resumed_from=reference,
        ),
    )


def test_an_owner_silent_for_the_lease_is_ended_as_lost_and_followed(owned: FabricatedRun) -> None:
    assert claim(owned, Clock()).attempt == 2
    ended = owned.log.refresh().attempts[0].ended
    assert ended is not None and ended.reason == "lost"


def test_an_owner_that_writes_its_heartbeat_is_left_alone(owned: FabricatedRun) -> None:
    clock = Clock()
    clock.during_sleep = lambda: owned.beat(4)
    with pytest.raises(LiveOwner, match="still writes its heartbeat"):
        claim(owned, clock)


def test_an_owner_whose_process_is_gone_is_followed_after_little_more_than_one_heartbeat() -> None:
    run = fabricate(MemoryStore("claims"), "bard")
    run.start(placement=entries.gone_placement())
    run.beat(3)
    clock = Clock()
    assert claim(run, clock).attempt == 2
    assert 0.3 < clock.now < 0.7


def test_a_heartbeat_that_moves_outvotes_a_missing_process() -> None:
    run = fabricate(MemoryStore("claims"), "bard")
    run.start(placement=entries.gone_placement())
    clock = Clock()
    clock.during_sleep = lambda: run.beat(4)
    with pytest.raises(LiveOwner, match="still writes its heartbeat"):
        claim(run, clock)


def test_an_owner_that_commits_between_two_heartbeats_is_left_alone(owned: FabricatedRun) -> None:
    clock = Clock()
    clock.during_sleep = lambda: None if owned.log.state.checkpoints else owned.commit(10) and None
    with pytest.raises(LiveOwner, match="still commits"):
        claim(owned, clock)
    assert owned.log.refresh().open_attempt is not None


def mark(run: FabricatedRun, fault: str, attempt: int) -> None:
    """Mark a fault as the attempt does before it injects it."""
    plan = FaultPlan(run.log.store, run.log.prefix, fault, attempt=attempt)
    assert list(plan.due(int(fault.split("@")[1]))) == [FaultKind(fault.split("@")[0])]


def test_a_vanished_attempt_ends_with_the_last_sign_of_life_the_peak_and_the_injected_faults_of_its_traces() -> None:
    run = fabricate(MemoryStore("claims"), "bard")
    run.start(faults="pause@2,kill@3,hang@9")
    run.beat(3)
    for attempt, kind, number in ((1, "kill", 3), (1, "pause", 2), (7, "hang", 9)):
        mark(run, f"{kind}@{number}", attempt)
    run.log.store.create(f"{run.log.prefix}/faults/pause-2-go.json", b"{}")
    claim(run, Clock())
    ended = run.log.refresh().attempts[0].ended
    assert ended is not None and ended.peak == DevicePeak(flops=4e12, source="data sheet")
    assert (ended.last_seen_at, ended.starting_seconds, ended.injected) == (NOON, 1.75, ("pause@2", "kill@3"))
    assert ended.detail.startswith("injected (pause@2, kill@3): ")


def test_without_faults_to_inject_the_end_of_an_attempt_looks_for_none(owned: FabricatedRun) -> None:
    mark(owned, "kill@3", 1)
    claim(owned, Clock())
    ended = owned.log.refresh().attempts[0].ended
    assert ended is not None and ended.injected == ()
