"""Aliases are decisions in a log of any length: no promotion is lost, none is made on what was true before."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from cairn.storage.errors import StorageError
from cairn.storage.logs import fold_cache
from cairn.storage.logs.registry import Promoted, Refused, Registry, RegistryState, RolledBack, list_aliases
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.settings import CheckpointConfig
from tests.entries import refusals
from tests.memory_store import MemoryStore
from tests.storage.builders import commit, copy_objects, promoted, run_log, run_with_commits, stage
from tests.storage.faulty_store import FaultyStore


def rolled_back(to: str | None) -> RolledBack:
    return RolledBack(alias="champion", manifest_sha256=to, by="test", why="worse")


def refused(step: int) -> Refused:
    return Refused(
        alias="champion", run_id="r1", step=step, manifest_sha256=f"m{step}", gate="val_loss", detail="", by="test"
    )


def champion_step(store: ObjectStore) -> int | None:
    champion = Registry(store, "champion").refresh().champion
    return champion.step if champion else None


def test_an_alias_nobody_promoted_to_has_no_champion(store: ObjectStore) -> None:
    assert champion_step(store) is None


def test_a_promotion_points_the_alias_at_its_checkpoint(store: ObjectStore) -> None:
    Registry(store, "champion").append(lambda state: promoted(5))
    assert champion_step(store) == 5


def test_of_two_promotions_at_once_the_slower_one_decides_again_on_the_new_champion(store: ObjectStore) -> None:
    slow, seen = Registry(store, "champion"), []

    def decide(state: RegistryState) -> Promoted:
        seen.append(state.champion.step if state.champion else None)
        if len(seen) == 1:
            Registry(store, "champion").append(lambda state: promoted(5))
        return promoted(10, previous=state.champion.manifest_sha256 if state.champion else None)

    slow.append(decide)
    assert seen == [None, 5]
    champion = Registry(store, "champion").refresh().champion
    assert champion is not None
    assert champion.previous == "m5"


def test_a_slower_promotion_whose_gate_now_refuses_changes_nothing(store: ObjectStore) -> None:
    barrier = threading.Barrier(2)

    def promote_if_none(step: int) -> None:
        def decide(state: RegistryState) -> Promoted | Refused:
            if state.champion is None:
                barrier.wait(240)
                return promoted(step)
            return refused(step)

        Registry(store, "champion").append(decide)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(promote_if_none, (5, 10)))
    state = Registry(store, "champion").refresh()
    assert (len(state.champions), len(refusals(state))) == (1, 1)


def test_a_rollback_goes_back_to_the_champion_before(store: ObjectStore) -> None:
    registry = Registry(store, "champion")
    for body in (promoted(5), promoted(10, previous="m5"), rolled_back("m5")):
        registry.append(lambda state, body=body: body)  # type: ignore[misc]
    assert champion_step(store) == 5


def test_a_rollback_beyond_the_first_promotion_leaves_no_champion(store: ObjectStore) -> None:
    registry = Registry(store, "champion")
    for body in (promoted(5), rolled_back(None), rolled_back(None)):
        registry.append(lambda state, body=body: body)  # type: ignore[misc]
    assert champion_step(store) is None


def test_a_refusal_is_on_record_and_changes_nothing(store: ObjectStore) -> None:
    registry = Registry(store, "champion")
    registry.append(lambda state: promoted(5))
    state = registry.append(lambda state: refused(10))
    assert [body.step for body in refusals(state)] == [10]
    assert champion_step(store) == 5


def test_a_promotion_that_is_not_a_number_is_refused_before_it_is_written(store: ObjectStore) -> None:
    with pytest.raises(StorageError, match="not written"):
        Registry(store, "champion").append(lambda state: promoted(5, metrics={"val_loss": float("nan")}))
    assert list_aliases(store) == []


def test_aliases_are_listed(store: ObjectStore) -> None:
    for alias in ("champion", "candidate"):
        Registry(store, alias).append(lambda state: promoted(5))
    assert list_aliases(store) == ["candidate", "champion"]


@pytest.mark.parametrize("alias", ["..", "a/../../b", "", ".x"])
def test_an_alias_that_is_no_plain_name_is_refused(store: ObjectStore, alias: str) -> None:
    with pytest.raises(StorageError, match="alias"):
        Registry(store, alias)


PROMOTED = promoted(5, run_id="other")
REFUSED = Refused(alias="champion", run_id="other", step=5, manifest_sha256="m", gate="better", detail="no", by="test")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_cache, "PART_ITEMS", 16)


def decided(store: ObjectStore, decisions: int) -> Registry:
    """Promote, refuse and, at every tenth decision, go back by one."""
    registry = Registry(store, "champion")
    for number in range(decisions):
        named = {"manifest_sha256": f"m{number}", "pin_id": f"pin-{number}"}
        body: Promoted | Refused | RolledBack = replace(PROMOTED if number % 3 else REFUSED, **named)
        if number % 10 == 9:
            back = registry.state.champions[-2][1].manifest_sha256
            body = RolledBack(alias="champion", manifest_sha256=back, by="test", why="worse")
        registry.append(lambda state, body=body: body)
    return registry


@pytest.mark.parametrize("decisions", [10, 400])
def test_a_commits_sweep_needs_32_requests_whatever_the_length_of_the_registry(decisions: int) -> None:
    store = MemoryStore()
    log = run_with_commits(store, 10, 20)
    sweep_run(log, CheckpointConfig(keep_last=2, keep_best=0), "s")
    decided(store, decisions)
    commit(log, stage(store, step=30, attempt=1))
    counting = FaultyStore(store)
    report = sweep_run(run_log(counting), CheckpointConfig(keep_last=2, keep_best=0), "s")  # type: ignore[arg-type]
    assert report.freed_bytes > 0
    assert len(counting.operations) <= 32, counting.operations


def test_a_registry_read_from_its_cache_has_every_decision() -> None:
    store, bare = MemoryStore(), MemoryStore()
    decided(store, 200)
    assert store.size("models/champion/fold.json")
    copy_objects(store, bare)
    for key in bare.keys("models/champion/fold"):
        bare.delete(key)
    bare.delete("models/champion/fold.json")
    assert Registry(store, "champion").refresh() == Registry(bare, "champion").refresh()


def test_a_part_of_a_registrys_cache_that_is_missing_is_replaced_by_the_entries() -> None:
    store = MemoryStore()
    state = decided(store, 200).state
    for key in store.keys("models/champion/fold"):
        store.delete(key)
    assert Registry(store, "champion").refresh() == state


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_sweep_caches_a_long_registry_that_nobody_cached_unless_it_is_a_dry_run(dry_run: bool) -> None:
    store = MemoryStore()
    log = run_with_commits(store, 10, 20)
    decided(store, 50)
    store.delete("models/champion/fold.json")
    sweep_run(log, CheckpointConfig(), "s", dry_run=dry_run)
    assert (store.size("models/champion/fold.json") is None) == dry_run
