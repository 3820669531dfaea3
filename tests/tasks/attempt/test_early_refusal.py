"""Whether a run has a live owner is seen before a flow begins, in two heartbeats at most."""

from datetime import timedelta

import pytest

from cairn.tasks.attempt.attempt_entries import refuse_live_owner
from cairn.tasks.configuration.settings import LeaseConfig
from cairn.tasks.errors import LiveOwner
from tests import entries
from tests.entries import NOON
from tests.fabricated_run import FabricatedRun, fabricate
from tests.memory_store import MemoryStore
from tests.settled_run import hold
from tests.tasks.slept_clock import Clock

LEASE = LeaseConfig(seconds=9.0, heartbeat_seconds=3.0)


@pytest.fixture
def run() -> FabricatedRun:
    return fabricate(MemoryStore("owners"), "bard")


def seconds_to_pass(run: FabricatedRun, clock: Clock | None = None) -> float:
    clock = clock or Clock()
    refuse_live_owner(run.log, LEASE, monotonic=clock.monotonic, sleep=clock.sleep)
    return clock.now


def test_a_living_process_of_this_machine_with_a_fresh_heartbeat_is_believed(run: FabricatedRun) -> None:
    hold(run)
    clock = Clock()
    with pytest.raises(LiveOwner, match="is at work"):
        seconds_to_pass(run, clock)
    assert clock.now == 0.0


def test_an_owner_elsewhere_that_writes_its_heartbeat_is_left_alone(run: FabricatedRun) -> None:
    run.start()
    run.beat(3)
    clock = Clock()
    clock.during_sleep = lambda: run.beat(4)
    with pytest.raises(LiveOwner, match="still writes its heartbeat"):
        seconds_to_pass(run, clock)


def test_an_owner_elsewhere_that_is_silent_is_left_to_the_claim_after_two_heartbeats(run: FabricatedRun) -> None:
    run.start()
    run.beat(3)
    assert seconds_to_pass(run) == pytest.approx(6.0)


def test_a_living_process_whose_heartbeat_is_old_is_not_believed(run: FabricatedRun) -> None:
    hold(run, beat_at=NOON - timedelta(days=1))
    assert seconds_to_pass(run) == pytest.approx(6.0)


class TellingStore(MemoryStore):
    """Says that everything in it is `age` seconds old."""

    age = 0.0

    def age_seconds(self, key: str) -> float | None:
        return self.age


def elsewhere(age: float) -> FabricatedRun:
    store = TellingStore("owners")
    store.age = age
    run = fabricate(store, "bard")
    run.start(host="elsewhere")
    run.beat(3)
    return run


@pytest.mark.parametrize("age", [-1.0, 0.0, 4.4])
def test_a_heartbeat_that_the_store_calls_fresh_is_believed_at_once(age: float) -> None:
    clock = Clock()
    with pytest.raises(LiveOwner, match=r"on elsewhere .* wrote its heartbeat \d s ago by the store's clock"):
        seconds_to_pass(elsewhere(age), clock)
    assert clock.now == 0.0


@pytest.mark.parametrize("age", [-3600.0, 4.6, 3600.0])
def test_a_heartbeat_that_the_store_does_not_call_fresh_is_watched(age: float) -> None:
    assert seconds_to_pass(elsewhere(age)) == pytest.approx(6.0)


def test_a_scheduler_that_starts_a_run_again_right_after_a_death_is_not_turned_away() -> None:
    clock, run = Clock(), elsewhere(1.0)
    refuse_live_owner(run.log, LEASE, monotonic=clock.monotonic, sleep=clock.sleep, is_asked_by_person=False)
    assert clock.now == pytest.approx(6.0)


def test_an_owner_whose_process_is_gone_costs_no_wait(run: FabricatedRun) -> None:
    run.start(placement=entries.gone_placement())
    assert seconds_to_pass(run) == 0.0


def test_a_run_that_nobody_owns_costs_no_wait(run: FabricatedRun) -> None:
    assert seconds_to_pass(run) == 0.0
