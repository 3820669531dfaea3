"""Deleting a run: refused where an alias, a fork or an owner needs it, and nothing follows the entry that closes it.

That a kill between any two operations leaves nothing half done for good: scenarios `delete` of `tests/protocol`.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from cairn.reports.queries.alias_history import list_decisions
from cairn.reports.queries.run_status import list_runs, phase_of
from cairn.storage.checkpoints.resume_point import new_pin, pin_checkpoint
from cairn.storage.checkpoints.sweep import SweepReport
from cairn.storage.errors import Fenced, IntegrityError
from cairn.storage.logs.log_entry import ForkOrigin, Writer
from cairn.storage.logs.registry import Registry
from cairn.storage.logs.run_entries import RunDeleted
from cairn.storage.logs.run_index import RunIndex
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.logs.step_log import Heartbeat, write_heartbeat
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.attempt.attempt_entries import Claimant, claim_attempt
from cairn.tasks.checkpoints.retention import check_deletion, delete_run
from cairn.tasks.configuration.settings import BudgetsConfig, LeaseConfig
from cairn.tasks.errors import GateRefused, InvalidConfiguration, LiveOwner
from tests import entries
from tests.entries import gone_placement, placement, started, writer
from tests.fabricated_run import fabricate, promote
from tests.memory_store import MemoryStore
from tests.storage.builders import RUN, check_invariants, ended_run, laid_out, run_log, stage

CHECKPOINTS = f"runs/{RUN}/checkpoints"
DELETION = RunDeleted(by="me", why="a first try")


def claimant(during_sleep: Callable[[], None] = lambda: None) -> Claimant:
    """Who waits for a silent owner on a clock that only waiting moves."""
    slept = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        during_sleep()

    lease = LeaseConfig(seconds=1.0, heartbeat_seconds=0.25)
    return Claimant(lease=lease, budgets=BudgetsConfig(), writer=writer(), monotonic=lambda: sum(slept), sleep=sleep)


def delete(log: RunLog) -> SweepReport:
    return delete_run(log, DELETION, claimant())


@pytest.fixture
def log() -> RunLog:
    """A run whose attempt has ended, with two commits."""
    return ended_run(10, 20)


def promote_step(log: RunLog, step: int, alias: str = "champion") -> None:
    record = next(record for record in log.state.readable if record.committed.step == step)
    promote(log.store, RUN, record.committed.reference, loss=1.0, alias=alias)


def promote_others(log: RunLog, count: int) -> None:
    """Point the alias at so many checkpoints of another run."""
    other = fabricate(log.store, "other")
    other.start()
    for step in range(1, count + 1):
        promote(log.store, "other", other.commit(step), loss=0.5, alias="champion")


def fork(log: RunLog, name: str = "twin") -> RunLog:
    record = log.state.readable[-1].committed
    pin_checkpoint(log, new_pin(record.reference, placement(), fork=name), writer=writer())
    origin = ForkOrigin(run_id=RUN, checkpoint=record.reference, state_sha256=record.state_sha256)
    forked = RunLog(log.store, name)
    forked.append(lambda state: entries.opened(name, forked_from=origin), writer=writer())
    return forked


def test_its_checkpoints_go_and_its_log_stays(store: ObjectStore) -> None:
    log = laid_out(store, 10, 20)
    stage(store, step=30, attempt=1)
    before = len(store.keys(f"runs/{RUN}/log"))
    report = delete(log)
    assert store.keys(CHECKPOINTS) == [] and report.freed_bytes > 0
    assert len(store.keys(f"runs/{RUN}/log")) == before + 4, "attempt-ended, run-deleted, checkpoint-deleted twice"
    state = check_invariants(store, set())
    assert state.deleted == RunDeleted(by="me", why="a first try")
    assert {record.state for record in state.checkpoints} == {"deleted"}


def test_deleting_it_again_changes_nothing(log: RunLog) -> None:
    delete(log)
    before = run_log(log.store).refresh()
    assert delete(run_log(log.store)).freed_bytes == 0
    assert run_log(log.store).refresh() == before


def test_a_cached_fold_remembers_that_it_was_deleted(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.storage.logs.run_log.FOLD_EVERY_ENTRIES", 1)
    delete(log)
    reader = run_log(log.store)
    assert reader.refresh() == log.state and log.state.deleted is not None


def test_it_is_not_claimed_any_more(log: RunLog) -> None:
    delete(log)
    words = rf"run {RUN} was deleted on .* by me \(a first try\); .*; choose another run id"
    with pytest.raises(InvalidConfiguration, match=words):
        claim_attempt(log, claimant(), lambda number, reference, state: started(number))


def test_a_claim_that_comes_too_late_is_fenced_in_words(log: RunLog) -> None:
    delete(log)
    with pytest.raises(Fenced, match="was deleted on"):
        log.append(lambda state: started(2), writer=writer())


def test_nothing_is_pinned_in_it_any_more(log: RunLog) -> None:
    reference = log.state.readable[-1].committed.reference
    delete(log)
    assert not pin_checkpoint(log, new_pin(reference, placement(), alias="champion"), writer=writer())


@pytest.mark.parametrize("place", [0, 1], ids=["present", "previous"])
def test_what_an_alias_points_at_or_goes_back_to_next_is_needed(log: RunLog, place: int) -> None:
    promote_step(log, 20)
    promote_others(log, place)
    with pytest.raises(GateRefused, match=r"alias champion: .* step 20; `cairn promote OTHER --alias champion`"):
        delete(log)
    assert log.refresh().deleted is None and len(log.state.readable) == 2


def test_an_older_promotion_is_withdrawn_and_a_rollback_passes_it_by(log: RunLog) -> None:
    promote_step(log, 20)
    promote_others(log, 2)
    assert check_deletion(log) == ("champion",)
    delete(log)
    champions = Registry(log.store, "champion").refresh().champions
    assert [promoted.run_id for _, promoted in champions] == ["other", "other"]
    assert check_deletion(log) == ()
    newest = list_decisions(log.store)[0]
    assert (newest.kind, newest.run_id, newest.by, newest.why) == ("withdrawn", RUN, "me", "a first try")


def test_an_offer_that_is_not_decided_is_needed(log: RunLog) -> None:
    reference = log.state.readable[-1].committed.reference
    pin_checkpoint(log, new_pin(reference, placement(host="elsewhere"), alias="next"), writer=writer())
    with pytest.raises(GateRefused, match=r"alias next is undecided, and process .* may still offer it"):
        delete(log)


def test_an_offer_of_a_dead_process_is_refused_for_it(log: RunLog) -> None:
    reference = log.state.readable[-1].committed.reference
    pin_checkpoint(log, new_pin(reference, gone_placement(), alias="next"), writer=writer())
    delete(log)
    decisions = Registry(log.store, "next").refresh().history
    assert [item.refused.gate for item in decisions if item.refused] == ["abandoned"]


def test_a_fork_without_a_checkpoint_of_its_own_needs_it(log: RunLog) -> None:
    fork(log)
    with pytest.raises(GateRefused, match=r"run twin, .*; `cairn train --run-id twin` makes more, `cairn delete twin`"):
        delete(log)


def test_a_fork_that_is_deleted_itself_needs_it_no_more(log: RunLog) -> None:
    delete_run(fork(log), DELETION, claimant())
    delete(log)
    assert log.state.deleted is not None


def test_an_owner_that_shows_life_keeps_it() -> None:
    log, beats = laid_out(MemoryStore("test"), 10), count(1)

    def beat() -> None:
        heartbeat = Heartbeat(attempt=1, beat=next(beats), step=1, train_loss=1.0, tokens=1, gpu_seconds=1.0)
        write_heartbeat(log.store, log.prefix, heartbeat)

    with pytest.raises(LiveOwner, match=r"attempt 1 on here .* still writes its heartbeat"):
        delete_run(log, DELETION, claimant(beat))
    assert log.refresh().deleted is None and log.state.open_attempt is not None


def test_the_attempt_of_a_silent_owner_ends_as_lost_first() -> None:
    log = laid_out(MemoryStore("test"), 10)
    delete(log)
    last = log.state.attempts[-1].ended
    assert last is not None and last.reason == "lost"


def test_an_attempt_that_claims_meanwhile_keeps_it(log: RunLog) -> None:
    rival = run_log(log.store)
    append = log.append

    def append_late(decide: Callable[[RunState], Any], *, writer: Writer) -> RunState:
        rival.append(lambda state: started(2), writer=writer)
        return append(decide, writer=writer)

    log.append = append_late  # type: ignore[method-assign]
    with pytest.raises(LiveOwner, match="attempt 2 has just claimed it"):
        delete(log)


def test_an_alias_that_cannot_be_read_keeps_it(log: RunLog) -> None:
    promote_step(log, 20, alias="broken")
    log.store.write(log.store.keys("models/broken/log")[0], b"{}")
    with pytest.raises(IntegrityError, match="models/broken"):
        delete(log)
    assert log.refresh().deleted is None


def test_a_half_deleted_run_says_so_until_it_is_deleted_again(log: RunLog) -> None:
    log.append(lambda state: RunDeleted(by="me", why=""), writer=writer())
    assert phase_of(log.state) == "deleting"
    delete(log)
    assert phase_of(log.state) == "deleted"


def test_a_watchers_index_takes_it_for_deleted_at_once(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    index = RunIndex(log.store)
    index.refresh()
    index.note(log, is_over=True)
    index.save()
    monkeypatch.setattr("cairn.storage.logs.run_index.ASKED_OVER_RUNS", 0)
    assert [row.state for row in list_runs(log.store)] == ["interrupted"]
    delete(log)
    assert [(row.state, row.step) for row in list_runs(log.store)] == [("deleted", 20)]
