"""What `cairn verify` finds beyond checkpoints: the weights a run began from, and the aliases of the store."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from cairn.operations.checks import verify_run
from cairn.storage.checkpoints.resume_point import new_pin, pin_checkpoint
from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import entry_name
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.object_store import MAX_READ_BYTES
from cairn.tasks.trainer.initial_weights import WeightsSource, keep_source
from tests.entries import placement, writer
from tests.fabricated_run import FabricatedRun, fabricate, promote
from tests.memory_store import MemoryStore
from tests.storage.builders import opened

WEIGHTS = b"the weights it began from"
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
KEY = f"initial/{SHA256}/weights.safetensors"


@pytest.fixture
def store() -> MemoryStore:
    """A run that was opened with weights of its own."""
    store = MemoryStore("begun")
    body = replace(opened(), initial_weights_sha256=SHA256)
    RunLog(store, body.run_id).append(lambda state: body, writer=writer())
    return store


def initial_problems(store: MemoryStore) -> list[str]:
    return [problem for problem in verify_run(store, opened().run_id).problems if problem.startswith("initial/")]


@pytest.mark.parametrize(
    ("found", "said"),
    [(WEIGHTS, []), (b"T" + WEIGHTS[1:], [KEY]), (None, ["missing"])],
    ids=["as they were", "a flipped byte", "absent"],
)
def test_the_weights_a_run_began_from_are_hashed_again(
    store: MemoryStore, found: bytes | None, said: list[str]
) -> None:
    if found is not None:
        store.write(KEY, found)
    problems = initial_problems(store)
    assert [word for word, problem in zip(said, problems, strict=True) if word not in problem] == []


def test_a_flipped_byte_in_what_is_kept_of_their_folder_is_named() -> None:
    store, source = MemoryStore("begun"), WeightsSource(name="theirs", licence="mit", files={}, documents={})
    body = replace(opened(), initial_source_sha256=(sha256 := keep_source(store, source)))
    RunLog(store, body.run_id).append(lambda state: body, writer=writer())
    assert initial_problems(store) == []
    store.write(key := f"initial/{sha256}/source.json", b"T" + store.read(key)[1:])
    assert [key in problem for problem in initial_problems(store)] == [True]


@pytest.fixture
def promoted_run(store: MemoryStore) -> FabricatedRun:
    """A run whose second checkpoint is the champion of an alias."""
    run = fabricate(store, "bard")
    run.start()
    promote(store, "bard", run.commit(10), loss=3.0, alias="champion")
    promote(store, "bard", run.commit(20), loss=2.0, alias="champion")
    return run


def alias_problems(store: MemoryStore) -> list[str]:
    return [problem for problem in verify_run(store, "bard").problems if problem.startswith("models/")]


def registry_entry(seq: int) -> str:
    return f"models/champion/log/{entry_name(seq)}"


def change_decision(store: MemoryStore, run: FabricatedRun) -> None:
    store.write(registry_entry(0), store.read(registry_entry(0)).replace(b"a test", b"a thief"))


def pin_for_a_lost_alias(store: MemoryStore, run: FabricatedRun) -> None:
    pin_checkpoint(run.log, new_pin(run.log.state.resume[0], placement(), alias="lost"), writer=writer())


Damage = Callable[[MemoryStore, FabricatedRun], object]
DAMAGES: dict[str, tuple[Damage, list[str]]] = {
    "none": (lambda store, run: None, []),
    "a changed decision": (change_decision, ["its checksum is"]),
    "a decision that is a hole": (lambda store, run: store.delete(registry_entry(0)), ["seq 0 is missing"]),
    "the end of the run's log gone": (
        lambda store, run: store.delete(f"runs/bard/log/{entry_name(run.log.seq)}"),
        ["its end is gone"],
    ),
    "a registry gone that a pin names": (pin_for_a_lost_alias, ["models/lost/log: is gone"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_that_an_alias_tells_of_is_named(promoted_run: FabricatedRun, store: MemoryStore, damage: str) -> None:
    act, said = DAMAGES[damage]
    act(store, promoted_run)
    problems = alias_problems(store)
    assert [word for word, problem in zip(said, problems, strict=True) if word not in problem] == []


def test_an_alias_says_that_the_runs_whole_log_is_gone(promoted_run: FabricatedRun, store: MemoryStore) -> None:
    for key in store.keys("runs/bard/log"):
        store.delete(key)
    with pytest.raises(IntegrityError, match="is gone, and alias champion points at the run"):
        verify_run(store, "bard")


def test_a_cached_registry_that_lost_its_end_is_named(promoted_run: FabricatedRun, store: MemoryStore) -> None:
    for number in range(8):
        promote(store, "bard", promoted_run.commit(30 + number), loss=1.0, alias="champion")
    for seq in (8, 9):
        store.delete(registry_entry(seq))
    store.delete(registry_entry(7))
    assert ["entries were deleted" in problem for problem in alias_problems(store)] == [True]


class GrowingStore(MemoryStore):
    """A store in which something happens when an object is read for the first time."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.happens: dict[str, Callable[[], object]] = {}

    def read(self, key: str, *, at_most_bytes: int = MAX_READ_BYTES) -> bytes:
        if (happens := self.happens.pop(key, None)) is not None:
            happens()
        return super().read(key, at_most_bytes=at_most_bytes)


def test_a_cached_fold_that_a_run_at_work_has_moved_on_meanwhile_is_no_problem() -> None:
    store = GrowingStore("growing")
    run = fabricate(store, "bard")
    run.start()
    run.commit(10)
    store.happens[RunLog(store, "bard").fold_key] = lambda: run.commit(20)
    assert [problem for problem in verify_run(store, "bard").problems if "fold.json" in problem] == []
    assert not store.happens
