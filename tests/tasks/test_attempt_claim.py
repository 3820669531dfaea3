import pytest

from storage.logs.log_entry import Writer
from storage.logs.run_entries import AttemptStarted
from storage.logs.run_log import RunLog
from storage.stores.memory_store import MemoryStore
from tasks.attempt.attempt_claim import Claimant, claim_attempt
from tasks.configuration.settings import BudgetsConfig, LeaseConfig
from tasks.errors import LiveOwner
from tests import entries
from tests.fabricated_run import FabricatedRun, fabricate


class Clock:
    """A clock that only sleeping moves; `during_sleep` is what the world does meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.during_sleep = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during_sleep()


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
