"""Offers at once: one is promoted, every other one is judged against it; what is reached is pinned, nothing else."""

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cairn.storage.logs.registry import ModelDecision, Promoted, Refused, Registry, RegistryState, SuiteReference
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.checkpoints.promotion import Candidate, PromotionRules, evaluations_of, offer, preview_offer
from cairn.tasks.errors import GateRefused
from tests.entries import evaluated, refusals, writer
from tests.memory_store import MemoryStore
from tests.storage.builders import RUN, run_with_commits

RULES = PromotionRules(required=(SuiteReference(name="held-out", sha256="s"),))


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """A store that threads share."""
    return MemoryStore("test") if request.param == "memory" else LocalStore(tmp_path / "store")


def measured(store: ObjectStore, **losses: float) -> RunLog:
    """A run with a commit for each `step_N=loss`, measured."""
    steps = {int(name.removeprefix("step_")): loss for name, loss in losses.items()}
    log = run_with_commits(store, *steps)
    for record in log.state.checkpoints:
        step, manifest = record.committed.step, record.committed.manifest_sha256
        body = replace(evaluated(step, steps[step]), manifest_sha256=manifest)
        log.append(lambda state, body=body: body, writer=writer())  # type: ignore[misc]
    return log


def candidate(store: ObjectStore, step: int) -> tuple[RunLog, Candidate]:
    log = RunLog(store, RUN)
    record = next(item for item in log.refresh().checkpoints if item.committed.step == step)
    reference = record.committed.reference
    evaluations = evaluations_of(log.state, reference.manifest_sha256)
    return log, Candidate(run_id=RUN, reference=reference, evaluations=evaluations, by=f"offerer of {step}")


def offered(store: ObjectStore, step: int, registry: Registry | None = None) -> bool:
    log, offered = candidate(store, step)
    try:
        offer(log, registry or Registry(store, "champion"), offered, RULES)
    except GateRefused:
        return False
    return True


def steps_of(state: RegistryState) -> list[tuple[str, int]]:
    return [(type(body).__name__, body.step) for _, body in state.history if isinstance(body, (Promoted, Refused))]


class Late(Registry):
    """Lets a rival be faster once, between its own decision and its append."""

    def __init__(self, store: ObjectStore, rival: int) -> None:
        super().__init__(store, "champion")
        self._store, self._rivals = store, [rival]

    def append(self, decide: Callable[[RegistryState], ModelDecision | None]) -> RegistryState:
        def decide_slowly(state: RegistryState) -> ModelDecision | None:
            body = decide(state)
            if self._rivals:
                offered(self._store, self._rivals.pop())
            return body

        return super().append(decide_slowly)


def test_of_two_offers_at_once_the_slower_is_judged_against_the_new_champion(store: ObjectStore) -> None:
    measured(store, step_10=2.5, step_20=2.0)
    assert not offered(store, 10, Late(store, rival=20))
    state = Registry(store, "champion").refresh()
    assert steps_of(state) == [("Promoted", 20), ("Refused", 10)]
    assert "champion's 2.0000" in refusals(state)[0].detail


def test_a_slower_offer_that_is_better_still_names_the_new_champion_as_the_one_before(store: ObjectStore) -> None:
    measured(store, step_10=2.5, step_20=2.0)
    assert offered(store, 20, Late(store, rival=10))
    champion = Registry(store, "champion").refresh().champion
    assert champion is not None
    assert (champion.step, champion.previous) == (20, candidate(store, 10)[1].reference.manifest_sha256)


def test_of_many_threads_the_best_ends_as_champion_and_every_promotion_was_better_than_the_one_before(
    store: ObjectStore,
) -> None:
    losses = {f"step_{step}": 3.0 - step / 100 for step in range(10, 90, 10)}
    measured(store, **losses)
    barrier = threading.Barrier(8)

    def run(step: int) -> bool:
        barrier.wait(240)
        return offered(store, step)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(run, range(10, 90, 10)))
    state = Registry(store, "champion").refresh()
    taken = [body for _, body in state.champions]
    assert taken[-1].step == 80 and len(state.history) == 8 and answers.count(True) == len(taken)
    assert [body.previous for body in taken] == [None, *(body.manifest_sha256 for body in taken[:-1])]
    pinned = {pin.manifest_sha256 for pin in RunLog(store, RUN).refresh().pins}
    assert pinned == {body.manifest_sha256 for body in taken}, (
        "what a rollback reaches is pinned, what was refused is not"
    )


def offer_in_a_process(folder: Path, step: int, starter: "Connection[str, str]") -> None:
    store = LocalStore(folder)
    starter.send("ready")
    assert starter.recv() == "go"
    offered(store, step)


@pytest.mark.slow  # quick witness: test_of_many_threads_the_best_ends_as_champion_and_… on the same store in a folder
def test_of_two_processes_at_once_one_wins_and_the_other_is_judged_against_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    measured(store, step_10=2.0, step_20=2.0)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]  # a barrier would need a shared memory that anybody may write to
    processes = [
        context.Process(target=offer_in_a_process, args=(tmp_path / "store", step, theirs))
        for step, (_, theirs) in zip((10, 20), pipes, strict=True)
    ]
    for process in processes:
        process.start()
    assert [ours.recv() for ours, _ in pipes] == ["ready", "ready"]
    for ours, _ in pipes:
        ours.send("go")
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0]
    state = Registry(store, "champion").refresh()
    assert [kind for kind, _ in steps_of(state)] == ["Promoted", "Refused"]
    assert [refused.gate for refused in refusals(state)] == ["better"]


def test_the_champions_evaluation_is_looked_up_in_its_own_run_when_it_was_promoted_under_another_suite(
    store: ObjectStore,
) -> None:
    log = measured(store, step_10=2.0, step_20=2.5)
    _, first = candidate(store, 10)
    elsewhere = replace(first.evaluations[0], suite_sha256="old", metrics={"val_loss": 9.0})
    old = PromotionRules(required=(SuiteReference(name="old", sha256="old"),))
    offer(log, Registry(store, "champion"), replace(first, evaluations=(elsewhere,)), old)
    assert not offered(store, 20)
    assert refusals(Registry(store, "champion").refresh())[0].gate == "better"


def test_foreseeing_leaves_nothing_on_record(store: ObjectStore) -> None:
    measured(store, step_10=2.0)
    before = store.keys("runs"), store.keys("models")
    log, offered = candidate(store, 10)
    assert isinstance(preview_offer(log, Registry(store, "champion"), offered, RULES), Promoted)
    assert (store.keys("runs"), store.keys("models")) == before


class Mourned(Registry):
    """A sweep takes the offering process for dead once, between its own decision and its append."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store, "champion")
        self._store = store

    def append(self, decide: Callable[[RegistryState], ModelDecision | None]) -> RegistryState:
        def after_the_sweep(state: RegistryState) -> ModelDecision | None:
            if not state.history:
                decision = decide(state)
                assert isinstance(decision, Promoted)
                named = {name: getattr(decision, name) for name in ("alias", "run_id", "step", "manifest_sha256", "by")}
                abandoned = Refused(**named, pin_id=decision.pin_id, gate="abandoned", detail="it died")
                Registry(self._store, "champion").append(lambda _: abandoned)
                return decision
            return decide(state)

        return super().append(after_the_sweep)


def test_an_offer_that_a_sweep_took_for_a_dead_ones_promotes_nothing_that_may_be_deleted(store: ObjectStore) -> None:
    measured(store, step_10=2.0)
    assert not offered(store, 10, Mourned(store))
    state = Registry(store, "champion").refresh()
    assert state.champion is None and steps_of(state) == [("Refused", 10)]


def test_a_refused_gate_completes_the_task_under_a_name_of_its_own_with_the_reason() -> None:
    # Prefect, for which the processes above would wait as well
    from cairn.flows.run.steps import state_of
    from cairn.tasks.promote import Offer, promote

    store = MemoryStore("test")
    log = measured(store, step_10=2.0, step_20=2.5)
    registry = Registry(store, "champion")
    offers = (Offer(candidate=candidate(store, step)[1], rules=RULES, registry=registry) for step in (10, 20))
    states = [state_of(promote.fn(offered, log)) for offered in offers]
    assert [(state.type.value, state.name) for state in states] == [
        ("COMPLETED", "Completed"),
        ("COMPLETED", "Refused"),
    ]
    assert states[0].message == "champion is step 10 with held-out loss 2.0000"
    assert (states[1].message or "").startswith("not promoted: gate 'better' refused step 20: ")
