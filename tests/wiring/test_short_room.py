"""A store with little room, or one that refuses deletes: what the flow sets aside, when it sweeps, and how it ends."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from cairn.flows import train_gpt
from cairn.flows.run import attempt_trainer
from cairn.flows.run.attempt_trainer import AttemptTrainer
from cairn.flows.run.run_start import claim_next_attempt
from cairn.storage.errors import AppendUnknown, StoreFull, StoreRefused, StoreUnavailable
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.stores import local_disk
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.policy.failures import Evidence, kind_of
from cairn.tasks.policy.termination import EXIT_CODES, ExitCode, FlowOutcome, flow_outcome
from cairn.tasks.trainer.trainer_protocol import Waiting
from tests.wiring.flow_in_process import RUN, FlowWorld, end_with


@dataclass
class NotedSweep:
    """Notes how sweeps are asked for."""

    asked: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.asked.append("beside training")

    def finish(self) -> None:
        self.asked.append("before it goes on")


@pytest.fixture
def sweep() -> NotedSweep:
    return NotedSweep()


def test_an_attempt_sets_room_aside_for_entries(flow: FlowWorld) -> None:
    with flow.opened() as run:
        claim_next_attempt(run)
    assert len(list((flow.folder / "store" / "reserve").iterdir())) == local_disk.FILES


def test_a_sweep_comes_before_the_next_checkpoint_where_there_is_no_room_for_two(
    flow: FlowWorld, monkeypatch: pytest.MonkeyPatch, sweep: NotedSweep
) -> None:
    flow.train()
    newest = flow.log.state.newest_committed
    assert newest is not None
    for free, asked in ((2 * newest.committed.bytes, []), (2 * newest.committed.bytes - 1, ["before it goes on"])):
        monkeypatch.setattr(attempt_trainer, "free_bytes", lambda store, free=free: free)
        with flow.opened() as run:
            run.sweep = sweep  # type: ignore[assignment]
            attempt_trainer.make_room(run)
        assert sweep.asked == asked


def test_room_is_looked_for_before_each_segment(flow: FlowWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[object]()
    monkeypatch.setattr(attempt_trainer, "make_room", looked.append)
    flow.train("checkpoint.every_steps=5")
    assert len(looked) == 4


@pytest.mark.parametrize(("why", "asked"), [("the disk is full", ["beside training"]), ("", [])])
def test_a_checkpoint_that_waits_for_its_store_starts_a_sweep(
    flow: FlowWorld, sweep: NotedSweep, why: str, asked: list[str]
) -> None:
    with flow.opened() as run:
        run.sweep = sweep  # type: ignore[assignment]
        trainer = AttemptTrainer(run, claim_next_attempt(run))
        trainer._say_waiting(Waiting(step=5, why=why, seconds=1.0))
    assert sweep.asked == asked


def test_a_commit_starts_a_sweep_and_one_that_failed_does_not(flow: FlowWorld, sweep: NotedSweep) -> None:
    made, failed = Future[CheckpointReference](), Future[CheckpointReference]()
    made.set_result(CheckpointReference(step=5, attempt=1, prefix="p5", manifest_sha256="m5"))
    failed.set_exception(StoreFull("No space left on device"))
    with flow.opened() as run:
        run.sweep = sweep  # type: ignore[assignment]
        for commit, asked in ((failed, []), (made, ["beside training"])):
            run.note_commit(commit)
            assert sweep.asked == asked


def test_a_disk_that_stays_full_is_storage_charges_nothing_and_exits_75_each_time(flow: FlowWorld) -> None:
    error = StoreFull("No space left on device")
    full = Evidence(store_error=str(error), store_error_kind=kind_of(error))
    with flow.opened() as run:
        ends = [end_with(run, full) for _ in range(3)]
    for ended in ends:
        outcome = flow_outcome(ended.reason, ended.decision.action, ended.decision.charged)
        assert outcome is not None
        assert (ended.reason, ended.decision.charged, EXIT_CODES[outcome]) == ("storage", None, 75)
        assert "once that is mended, the same command continues" in ended.decision.reason


@pytest.fixture
def no_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket in which this user may write and not delete."""

    def refuse(store: LocalStore, keys: Sequence[str]) -> None:
        raise StoreRefused(f"{keys[0]}: cannot delete: AccessDenied")

    monkeypatch.setattr(LocalStore, "delete_all", refuse)


@pytest.mark.usefixtures("no_deletes")
def test_a_run_that_may_not_delete_what_nothing_needs_ends_as_an_error_that_says_so(flow: FlowWorld) -> None:
    state = flow.train("checkpoint.every_steps=5", "checkpoint.keep_last=1", "checkpoint.keep_best=0")
    assert state.is_failed() and flow.log.state.finished is not None
    assert f"AccessDenied; `cairn sweep {RUN} --store {flow.folder / 'store'}` frees it once it may" in str(
        state.message
    )
    assert EXIT_CODES[FlowOutcome.ERROR] == ExitCode.ERROR


@pytest.mark.usefixtures("no_deletes")
def test_a_run_of_which_nothing_is_to_be_deleted_ends_as_ever(flow: FlowWorld) -> None:
    assert flow.train().is_completed()


@pytest.mark.parametrize("kind", [StoreUnavailable, StoreRefused, AppendUnknown])
def test_a_run_whose_receipt_finds_no_room_ends_as_storage_and_can_be_continued(
    flow: FlowWorld, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(*arguments: object) -> None:
        raise kind("the disk is full")

    monkeypatch.setattr(train_gpt.attempt_trainer, "record_end", fail)
    state = flow.train()
    assert state.message == "storage: the disk is full; the same command continues"
    assert EXIT_CODES[FlowOutcome.STORAGE] == ExitCode.PREEMPTED
