"""Which finished runs were killed before their best checkpoint was offered."""

from typing import Any

import pytest

from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.logs.registry import Refused, Registry
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.checkpoints.promotion import pending_offer
from cairn.tasks.policy import early_stop, run_set
from tests.fabricated_run import HUMAN, FabricatedRun, fabricate, promote
from tests.memory_store import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("offers")


@pytest.fixture
def run(store: MemoryStore) -> FabricatedRun:
    return fabricate(store, "bard")


def pending(store: ObjectStore, run: FabricatedRun) -> str:
    return pending_offer(run.log.state, lambda alias: Registry(store, alias).refresh())


def finish(run: FabricatedRun, *overrides: str) -> CheckpointReference:
    run.start(overrides=overrides)
    final = run.commit(40)
    run.finish(final)
    run.end("completed", action="finish")
    return final


def refuse(store: ObjectStore, run_id: str, final: CheckpointReference) -> None:
    body: Any = Refused(
        alias="champion",
        run_id=run_id,
        step=final.step,
        manifest_sha256=final.manifest_sha256,
        gate="better",
        detail="it is not",
        by="a test",
    )
    Registry(store, "champion").append(lambda _: body)


def test_a_run_that_is_not_finished_has_nothing_to_offer(store: MemoryStore, run: FabricatedRun) -> None:
    run.start()
    assert pending(store, run) == ""


def test_a_finished_run_without_a_decision_awaits_its_offer(store: MemoryStore, run: FabricatedRun) -> None:
    run.evaluate(finish(run), loss=2.0)
    assert pending(store, run) == "champion"


def test_the_alias_is_that_of_the_run(store: MemoryStore, run: FabricatedRun) -> None:
    finish(run, "promotion.alias=rival")
    assert pending(store, run) == "rival"


def test_a_promotion_of_the_run_settles_it(store: MemoryStore, run: FabricatedRun) -> None:
    promote(store, "bard", finish(run), loss=2.0, alias="champion")
    assert pending(store, run) == ""


def test_a_refusal_of_the_run_settles_it(store: MemoryStore, run: FabricatedRun) -> None:
    refuse(store, "bard", finish(run))
    assert pending(store, run) == ""


def test_a_decision_about_another_run_settles_nothing(store: MemoryStore, run: FabricatedRun) -> None:
    promote(store, "other", finish(run), loss=2.0, alias="champion")
    assert pending(store, run) == "champion"


def test_a_run_of_which_no_evaluation_succeeded_is_left(store: MemoryStore, run: FabricatedRun) -> None:
    run.evaluate(finish(run), loss=None)
    assert pending(store, run) == ""


def test_a_run_that_asks_a_person_first_is_left_to_people(store: MemoryStore, run: FabricatedRun) -> None:
    run.evaluate(finish(run, "promotion.require_approval=true"), loss=2.0)
    assert pending(store, run) == ""


def test_a_run_that_lost_at_a_rung_of_its_set_is_offered_to_nobody(store: MemoryStore, run: FabricatedRun) -> None:
    run.start()
    lost = run.commit(20)
    run.evaluate(lost, loss=2.0)
    run.end("paused", action="stop")
    committed = run.log.state.checkpoints[-1].committed
    body = early_stop.finish(committed, 1, early_stop.Stop(step=20, rule=run_set.RULE, why="it lost"))
    run.log.append(lambda state: body, writer=HUMAN)
    assert pending(store, run) == ""
