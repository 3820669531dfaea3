"""A registry of any length is read in a bounded number of requests by a sweep, and loses no decision."""

from dataclasses import replace

import pytest

from cairn.storage.logs import fold_cache
from cairn.storage.logs.registry import Promoted, Refused, Registry, RolledBack
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.checkpoints.retention import sweep_run
from cairn.tasks.configuration.settings import CheckpointConfig
from tests.memory_store import MemoryStore
from tests.storage.builders import commit, copy_objects, promoted, run_log, run_with_commits, stage
from tests.storage.faulty_store import FaultyStore

pytestmark = pytest.mark.xdist_group("long-registry")

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
