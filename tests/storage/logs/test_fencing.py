"""An attempt that lost the run commits nothing: refused by its writer before the PUT, by the fold after it."""

from dataclasses import replace

import pytest

from cairn.storage.errors import Fenced
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.stores.object_store import ObjectStore
from tests.entries import ended, started, writer
from tests.memory_store import MemoryStore
from tests.storage.builders import (
    LOG,
    claim,
    commit,
    committed,
    forge,
    laid_out,
    opened,
    run_log,
    run_with_commits,
    stage,
)


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


def test_a_claim_over_an_attempt_that_has_not_ended_is_refused_before_it_is_written(store: ObjectStore) -> None:
    log = laid_out(store, 5)
    before = store.keys(LOG)
    with pytest.raises(Fenced):
        log.append(lambda state: started(2), writer=writer())
    assert store.keys(LOG) == before


FORGED: dict[str, tuple[object, int | None, bool]] = {
    "a commit of an attempt that was fenced": (committed(10, 1), 1, False),
    "a commit of the owner, by nobody": (committed(10, 2), None, False),
    "a commit of the owner, by the attempt before": (committed(10, 2), 1, False),
    "a commit of the owner, by an attempt that never began": (committed(10, 2), 3, False),
    "a second end of an attempt": (ended(1, "preempted"), None, False),
    "a claim of the first number": (started(1), None, True),
    "a claim of a number that was taken": (started(2), None, True),
    "a claim that leaves out a number": (started(4), None, True),
}
"""Each with its writer's attempt, and whether the owner has ended before."""


@pytest.mark.unsound_log
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_entry_has_no_effect_and_is_kept_as_refused(name: str) -> None:
    body, attempt, is_over = FORGED[name]
    store = MemoryStore()
    claim(run_with_commits(store, 5))
    if is_over:
        forge(store, ended(2))
    before = run_log(store).refresh()
    forge(store, body, attempt=attempt)
    after = run_log(store).refresh()
    assert replace(after, refused=before.refused) == before
    assert [item.attempt for item in after.refused] == [attempt]


@pytest.mark.unsound_log
def test_a_run_is_opened_once() -> None:
    log = run_with_commits(MemoryStore(), 5)
    forge(log.store, opened())
    assert log.refresh().opened_at == log.read_entries()[0].at
