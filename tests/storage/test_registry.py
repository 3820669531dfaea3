"""Aliases are decisions in a log: no promotion is lost, none is made on what was true before."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cairn.storage.errors import StorageError
from cairn.storage.logs.registry import Promoted, Refused, Registry, RegistryState, RolledBack, list_aliases
from cairn.storage.stores.object_store import ObjectStore
from tests.entries import refusals
from tests.storage.builders import promoted


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
