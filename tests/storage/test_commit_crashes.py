"""A crash between any two writes leaves the old newest checkpoint or the new one, never a third thing.

Every storage operation × every fault kind, over stage+commit and over claim+resume, on both stores.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from storage.checkpoint import checkpoint_prefix, newest_verified
from storage.errors import AppendUnknown, StoreUnavailable
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from tests.storage.builders import (
    RUN,
    check_invariants,
    claim,
    commit,
    run_log,
    run_with_commits,
    stage,
    writer,
)
from tests.storage.faulty_store import Death, Fault, FaultyStore

pytestmark = pytest.mark.usefixtures("no_fsync")

Scenario = Callable[[ObjectStore], set[str]]
OLDEST = checkpoint_prefix(f"runs/{RUN}", step=3, attempt=1)
OLD = checkpoint_prefix(f"runs/{RUN}", step=5, attempt=1)
NEW = checkpoint_prefix(f"runs/{RUN}", step=10, attempt=1)


def commit_next(store: ObjectStore) -> set[str]:
    """Stage and commit step 10 as attempt 1; returns what was acknowledged."""
    commit(run_log(store), stage(store, step=10, attempt=1))
    return {NEW}


def claim_and_resume(store: ObjectStore) -> set[str]:
    """Take the run over and find what to resume from."""
    log = run_log(store)
    claim(log)
    found = newest_verified(log, writer=writer())
    assert found is not None
    return {found.prefix}


class Stage:
    """Makes copies of one prepared store, quickly."""

    def __init__(self, kind: str, folder: Path, prepare: Callable[[ObjectStore], object]) -> None:
        self.kind, self.folder, self.number = kind, folder, count()
        self.memory = MemoryStore("base")
        self.local = folder / "base"
        prepare(self.memory if kind == "memory" else LocalStore(self.local))

    def fresh(self) -> ObjectStore:
        if self.kind == "memory":
            copy = MemoryStore("copy")
            for key in self.memory.keys("runs"):
                copy.write(key, self.memory.read(key))
            return copy
        target = self.folder / f"copy-{next(self.number)}"
        shutil.copytree(self.local, target)
        return LocalStore(target)


def cases(base: Stage, scenario: Scenario, fault: Fault) -> Iterator[tuple[ObjectStore, FaultyStore, set[str]]]:
    """Fail the scenario at each of its operations in turn; yields what is left and what was acknowledged."""
    for at in count():
        survivor = base.fresh()
        faulty = FaultyStore(survivor, fault, at)
        acknowledged: set[str] = set()
        with suppress(StoreUnavailable, AppendUnknown, Death):
            acknowledged = scenario(faulty)  # type: ignore[arg-type]
        if not faulty.fired:
            return
        yield survivor, faulty, acknowledged


def corrupt_newest(store: ObjectStore) -> None:
    run_with_commits(store, 3, 5)
    key = f"{OLD}/trainer.json"
    store.write(key, store.read(key).replace(b"5", b"6", 1))


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_fault_at_any_operation_of_stage_and_commit_leaves_the_old_or_the_new_newest(
    kind: str, fault: Fault, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    base = Stage(kind, tmp_path, lambda store: run_with_commits(store, 3, 5))
    number = 0
    for survivor, faulty, acknowledged in cases(base, commit_next, fault):
        number += 1
        state = check_invariants(survivor, {OLDEST, OLD} | acknowledged)
        assert state.newest_committed is not None
        assert state.newest_committed.committed.prefix in (OLD, NEW), faulty.operations
        follow(survivor)
    record_property("cases", number)
    assert number > 10


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_fault_at_any_operation_of_a_resume_over_a_corrupt_checkpoint_loses_nothing(
    kind: str, fault: Fault, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    base = Stage(kind, tmp_path, corrupt_newest)
    number = 0
    for survivor, _, acknowledged in cases(base, claim_and_resume, fault):
        number += 1
        assert acknowledged <= {OLDEST}
        found = newest_verified(run_log(survivor), writer=writer())
        assert found is not None
        assert found.prefix == OLDEST
        check_invariants(survivor, {OLDEST, OLD})
        follow(survivor)
    record_property("cases", number)
    assert number > 10


def follow(store: ObjectStore) -> None:
    """The next attempt takes the run over and commits the same step again."""
    log = run_log(store)
    attempt = claim(log)
    state = commit(log, stage(store, step=10, attempt=attempt))
    assert state.newest_committed is not None
    mine = checkpoint_prefix(f"runs/{RUN}", step=10, attempt=attempt)
    assert state.newest_committed.committed.prefix == mine
    check_invariants(store, {OLDEST, mine})


@pytest.mark.parametrize("fault", [Fault.ERROR_BEFORE, Fault.RESPONSE_LOST], ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_one_fault_at_the_commit_entry_itself_is_settled_and_acknowledged(
    kind: str, fault: Fault, tmp_path: Path
) -> None:
    base = Stage(kind, tmp_path, lambda store: run_with_commits(store, 3, 5))
    at_create = [
        (survivor, acknowledged)
        for survivor, faulty, acknowledged in cases(base, commit_next, fault)
        if faulty.operations[faulty.at or 0] == "create"
    ]
    assert [acknowledged for _, acknowledged in at_create] == [{NEW}]
    assert len(at_create[0][0].keys(f"runs/{RUN}/log")) == 5


def test_the_enumeration_reaches_every_operation_a_trainer_uses(tmp_path: Path) -> None:
    counting = FaultyStore(Stage("memory", tmp_path, corrupt_newest).fresh())
    claim_and_resume(counting)  # type: ignore[arg-type]
    commit(run_log(counting), stage(counting, step=10, attempt=2))  # type: ignore[arg-type]
    assert set(counting.operations) == {"read", "create", "write", "write_stream", "size"}


def test_a_process_that_dies_twice_during_its_resume_still_resumes(tmp_path: Path) -> None:
    base = Stage("memory", tmp_path, corrupt_newest)
    number = 0
    for first, _, _ in cases(base, claim_and_resume, Fault.DEATH_AFTER):
        for at in count():
            second = MemoryStore("second")
            for key in first.keys("runs"):
                second.write(key, first.read(key))
            faulty = FaultyStore(second, Fault.DEATH_AFTER, at)
            with suppress(Death):
                claim_and_resume(faulty)  # type: ignore[arg-type]
            if not faulty.fired:
                break
            number += 1
            assert claim_and_resume(second) == {OLDEST}
            check_invariants(second, {OLDEST, OLD})
    assert number > 100
