"""An attempt that lost the run commits nothing: refused by its writer before the PUT, by the fold after it."""

import pytest

from cairn.storage.errors import Fenced
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.stores.object_store import ObjectStore
from tests.entries import ended, started, writer
from tests.storage.builders import LOG, claim, commit, committed, forge, laid_out, opened, run_log, stage


@pytest.fixture
def zombie(store: ObjectStore) -> StagedCheckpoint:
    """A checkpoint that attempt 1 staged before attempt 2 took over."""
    log = laid_out(store, 5)
    staged = stage(store, step=10, attempt=1)
    claim(log)
    return staged


def test_a_commit_after_a_newer_claim_is_refused_before_anything_is_written(
    store: ObjectStore, zombie: StagedCheckpoint
) -> None:
    before = store.keys(LOG)
    with pytest.raises(Fenced, match="attempt 1 is fenced by attempt 2"):
        commit(run_log(store), zombie)
    assert store.keys(LOG) == before


def test_a_zombie_that_read_the_log_before_the_claim_is_fenced_all_the_same(store: ObjectStore) -> None:
    stale = laid_out(store, 5)
    stale.refresh()
    staged = stage(store, step=10, attempt=1)
    claim(run_log(store))
    with pytest.raises(Fenced):
        commit(stale, staged)


def test_a_claim_between_the_check_and_the_put_fences_the_commit(store: ObjectStore) -> None:
    log = laid_out(store, 5)
    claims = iter([lambda: claim(run_log(store))])

    def decide(state: object) -> object:
        for take_over in claims:
            take_over()
        return committed(10, 1)

    with pytest.raises(Fenced, match="fenced by attempt 2"):
        log.append(decide, writer=writer(1))


@pytest.mark.unsound_log
def test_a_forged_commit_of_an_old_attempt_has_no_effect_and_is_kept_as_refused(
    store: ObjectStore, zombie: StagedCheckpoint
) -> None:
    forge(store, committed(10, 1), attempt=1)
    state = run_log(store).refresh()
    assert [record.committed.step for record in state.checkpoints] == [5]
    assert [(item.kind, item.attempt) for item in state.refused] == [("checkpoint-committed", 1)]


@pytest.mark.unsound_log
@pytest.mark.parametrize("writing", [None, 1, 3])
def test_a_forged_commit_in_the_name_of_another_attempt_has_no_effect(
    store: ObjectStore, zombie: StagedCheckpoint, writing: int | None
) -> None:
    forge(store, committed(10, 2), attempt=writing)
    state = run_log(store).refresh()
    assert [record.committed.step for record in state.checkpoints] == [5]
    assert len(state.refused) == 1


def test_an_attempt_that_was_ended_commits_nothing_more(store: ObjectStore) -> None:
    log = laid_out(store, 5)
    log.append(lambda state: ended(1), writer=writer())
    with pytest.raises(Fenced, match="attempt 1 was ended by another process"):
        commit(log, stage(store, step=10, attempt=1))


def test_the_present_attempt_commits_after_its_predecessor_was_fenced(
    store: ObjectStore, zombie: StagedCheckpoint
) -> None:
    newest = commit(run_log(store), stage(store, step=10, attempt=2)).newest_committed
    assert newest is not None
    assert newest.committed.attempt == 2


@pytest.mark.unsound_log
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_claim_with_a_number_out_of_order_has_no_effect(store: ObjectStore, number: int) -> None:
    laid_out(store, 5)
    forge(store, ended(1))
    claim(run_log(store))
    forge(store, ended(2))
    forge(store, started(number))
    state = run_log(store).refresh()
    assert (state.latest_attempt, len(state.refused)) == (2, 1)


def test_a_claim_over_an_attempt_that_has_not_ended_is_refused_before_it_is_written(store: ObjectStore) -> None:
    log = laid_out(store, 5)
    before = store.keys(LOG)
    with pytest.raises(Fenced):
        log.append(lambda state: started(2), writer=writer())
    assert store.keys(LOG) == before


@pytest.mark.unsound_log
def test_an_attempt_ends_once(store: ObjectStore) -> None:
    log = laid_out(store, 5)
    log.append(lambda state: ended(1, "preempted"), writer=writer(1))
    forge(store, ended(1, "lost"))
    record = log.refresh().attempts[0]
    assert record.ended == ended(1, "preempted")


@pytest.mark.unsound_log
def test_a_run_is_opened_once(store: ObjectStore) -> None:
    log = laid_out(store, 5)
    forge(store, opened())
    assert log.refresh().opened_at == log.read_entries()[0].at
