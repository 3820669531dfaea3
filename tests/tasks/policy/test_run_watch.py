from typing import Any

import pytest

from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import Writer
from cairn.storage.logs.run_entries import RunDeleted
from cairn.storage.logs.run_state import RunState
from cairn.tasks.policy.run_watch import (
    Life,
    Observed,
    WatchAction,
    WatchDecision,
    decide_watch,
    lease_seconds,
)
from tests import entries
from tests.fabricated_run import FabricatedRun, fabricate
from tests.memory_store import MemoryStore

CONTINUED, LEFT, WAITS = WatchAction.CONTINUED, WatchAction.LEFT, WatchAction.WAITS
SEEN = 1000.0
LEASE = 30.0


@pytest.fixture
def run() -> FabricatedRun:
    """A run that was only opened."""
    return fabricate(MemoryStore("watched"), "bard", nodes_wanted=1)


def verdict(run: FabricatedRun, owner: Life, *, after: float = 0.0, **seen: Any) -> WatchDecision:
    observed = Observed(owner=owner, unchanged_since=SEEN, **seen)
    return decide_watch(run.log.state, observed, SEEN + after)


def finished(run: FabricatedRun) -> FabricatedRun:
    run.start()
    run.finish(run.commit(40))
    run.end("completed", action="finish")
    return run


@pytest.mark.parametrize("owner", Life)
def test_a_finished_run_is_left(run: FabricatedRun, owner: Life) -> None:
    assert verdict(finished(run), owner, after=1e6) == WatchDecision(action=LEFT, why="finished at step 40")


def test_a_deleted_run_is_left_whatever_it_lacks(run: FabricatedRun) -> None:
    run.start()
    run.commit(10)
    run.end("preempted", action="resume", charged="preempted", delay_seconds=0.0)
    run.log.append(lambda state: RunDeleted(by="me", why=""), writer=Writer(host="here", pid=1))
    found = verdict(run, Life.GONE, after=1e6, unoffered_to="champion")
    assert found.action == LEFT and found.why.startswith("run bard was deleted on 2026-01-01 by me")


def test_a_finished_run_that_died_before_its_offer_is_continued(run: FabricatedRun) -> None:
    found = verdict(finished(run), Life.GONE, unoffered_to="champion")
    assert found == WatchDecision(
        action=CONTINUED, why="finished at step 40, its best checkpoint not yet offered to champion"
    )


def test_a_finished_run_whose_process_lives_offers_by_itself(run: FabricatedRun) -> None:
    assert verdict(finished(run), Life.HERE, after=1e6, unoffered_to="champion").action == LEFT


def test_a_finished_run_elsewhere_has_time_for_its_last_evaluation_before_it_is_continued(run: FabricatedRun) -> None:
    waits = verdict(finished(run), Life.UNKNOWN, unoffered_to="champion")
    assert waits.action == WAITS and waits.until == SEEN + LEASE + 600.0
    assert verdict(run, Life.UNKNOWN, after=LEASE + 600.0, unoffered_to="champion").action == CONTINUED


def test_a_finished_run_whose_last_receipt_is_missing_is_continued(run: FabricatedRun) -> None:
    run.start()
    run.finish(run.commit(40))
    assert verdict(run, Life.GONE).action == CONTINUED


@pytest.mark.parametrize("owner", Life)
@pytest.mark.parametrize(
    ("reason", "said"),
    [
        *((reason, [reason, "so it was decided"]) for reason in ("error", "lost", "oom", "paused")),
        ("cancelled", ["a person stopped it"]),
    ],
)
def test_a_run_stopped_for_a_person_is_left_with_the_reason(
    run: FabricatedRun, owner: Life, reason: str, said: list[str]
) -> None:
    run.start()
    run.end(reason, action="stop")
    found = verdict(run, owner, after=1e6)
    assert found.action == LEFT and all(words in found.why for words in said)


def test_an_open_attempt_whose_process_lives_here_is_left_however_silent(run: FabricatedRun) -> None:
    run.start()
    assert verdict(run, Life.HERE).action == LEFT
    silent = verdict(run, Life.HERE, after=1e6)
    assert silent.action == LEFT and "silent" in silent.why


def test_an_open_attempt_whose_process_is_gone_is_continued_at_once(run: FabricatedRun) -> None:
    run.start()
    assert verdict(run, Life.GONE).action == CONTINUED


def test_an_open_attempt_elsewhere_is_waited_for_until_it_was_silent_for_its_lease(run: FabricatedRun) -> None:
    run.start()
    assert verdict(run, Life.UNKNOWN, after=LEASE - 0.1) == verdict(run, Life.UNKNOWN)
    waits = verdict(run, Life.UNKNOWN)
    assert waits.action == WAITS and waits.until == SEEN + LEASE
    assert verdict(run, Life.UNKNOWN, after=LEASE).action == CONTINUED


def test_an_open_attempt_elsewhere_that_moves_is_left(run: FabricatedRun) -> None:
    run.start()
    assert verdict(run, Life.UNKNOWN, shows_life=True).action == LEFT


def test_the_lease_is_the_one_of_the_attempt_itself(run: FabricatedRun) -> None:
    run.start(overrides=("lease.seconds=90",))
    assert lease_seconds(run.log.state) == 90
    assert verdict(run, Life.UNKNOWN, after=LEASE).action == WAITS


def test_an_attempt_whose_configuration_is_not_one_is_refused_with_the_key(run: FabricatedRun) -> None:
    body = entries.started(1, config={"data": {"sources": ["a.txt"]}})
    run.log.append(lambda state: body, writer=Writer(host="here", pid=1))
    with pytest.raises(IntegrityError, match="the configuration in the run's log is invalid: training"):
        verdict(run, Life.UNKNOWN)


@pytest.mark.parametrize("reason", ["preempted", "lost", "storage"])
@pytest.mark.parametrize(("owner", "expected"), [(Life.GONE, CONTINUED), (Life.HERE, LEFT)])
def test_a_run_to_be_resumed_is_left_to_its_process_until_that_is_gone(
    run: FabricatedRun, reason: str, owner: Life, expected: WatchAction
) -> None:
    run.start()
    run.end(reason, action="resume")
    assert verdict(run, owner, after=1e6).action == expected


@pytest.mark.parametrize(("reason", "said"), [("preempted", "is exiting"), ("lost", "is alive and continues")])
def test_of_a_process_that_lives_after_its_attempt_it_is_said_whether_it_goes_on(
    run: FabricatedRun, reason: str, said: str
) -> None:
    run.start()
    run.end(reason, action="resume")
    assert verdict(run, Life.HERE).why.endswith(f"its process {said}")


def test_a_back_off_counts_from_when_this_watcher_first_saw_the_end(run: FabricatedRun) -> None:
    run.start()
    run.end("storage", action="resume", delay_seconds=100.0)
    seen = Observed(owner=Life.GONE, unchanged_since=SEEN)
    waits = decide_watch(run.log.state, seen, SEEN + 99)
    assert waits.action == WAITS and waits.until == SEEN + 100
    assert decide_watch(run.log.state, seen, SEEN + 100).action == CONTINUED


def test_a_process_elsewhere_has_its_lease_to_go_on_by_itself_after_its_back_off(run: FabricatedRun) -> None:
    run.start()
    run.end("storage", action="resume", delay_seconds=100.0)
    seen = Observed(owner=Life.UNKNOWN, unchanged_since=SEEN)
    assert decide_watch(run.log.state, seen, SEEN + 129).action == WAITS
    assert decide_watch(run.log.state, seen, SEEN + 130).action == CONTINUED


def test_a_process_elsewhere_that_was_preempted_does_not_go_on_so_nobody_waits_for_it(run: FabricatedRun) -> None:
    run.start()
    run.end("preempted", action="resume", delay_seconds=0.0)
    assert verdict(run, Life.UNKNOWN).action == CONTINUED


@pytest.mark.parametrize(("owner", "expected"), [(Life.GONE, CONTINUED), (Life.HERE, LEFT), (Life.UNKNOWN, LEFT)])
def test_a_run_nobody_claimed_is_continued_only_when_its_opener_is_gone(
    run: FabricatedRun, owner: Life, expected: WatchAction
) -> None:
    assert verdict(run, owner, after=1e6).action == expected


def test_a_run_that_stands_where_it_stood_is_continued_ever_later_and_never_given_up(run: FabricatedRun) -> None:
    run.start()
    untils = []
    for futile in (1, 2, 3, 4, 50):
        found = verdict(run, Life.GONE, after=10.0, futile=futile, tried_at=SEEN + 10)
        assert found.action == WAITS
        untils.append(found.until - SEEN - 10)
        assert verdict(run, Life.GONE, after=10 + untils[-1], futile=futile, tried_at=SEEN + 10).action == CONTINUED
    assert untils == [30.0, 120.0, 480.0, 900.0, 900.0]


def test_an_empty_log_is_left() -> None:
    assert decide_watch(RunState(), Observed(owner=Life.UNKNOWN, unchanged_since=0.0), 0.0).action == LEFT


@pytest.mark.parametrize("scheduler", ["slurm job 4711", "kubernetes job cairn-bard"])
@pytest.mark.parametrize("reason", ["preempted", "lost", ""])
def test_a_run_that_a_scheduler_starts_again_is_left_to_it(run: FabricatedRun, scheduler: str, reason: str) -> None:
    run.start(placement=entries.placement(nodes_wanted=1, continued_by=scheduler))
    if reason:
        run.end(reason, action="resume")
    found = verdict(run, Life.GONE, after=1e6)
    assert found.action == LEFT and f"{scheduler} continues it" in found.why


def test_a_run_of_two_machines_that_was_only_opened_is_left() -> None:
    run = fabricate(MemoryStore("watched"), "bard", nodes_wanted=2)
    assert verdict(run, Life.GONE).action == LEFT


def test_a_run_that_wants_two_machines_is_not_continued_on_one(run: FabricatedRun) -> None:
    run.start(placement=entries.placement(nodes=1, nodes_wanted=2))
    found = verdict(run, Life.GONE)
    assert found.action == LEFT and "it wants 2 machines" in found.why


def test_a_run_that_a_person_continued_after_its_scheduler_is_watched_again(run: FabricatedRun) -> None:
    run.start(placement=entries.placement(continued_by="slurm job 4711"))
    run.end("preempted", action="resume")
    run.start(placement=entries.placement(nodes_wanted=1, continued_by="person"))
    assert verdict(run, Life.GONE).action == CONTINUED
