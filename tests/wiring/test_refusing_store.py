"""A run whose store refuses deletes or takes nothing more: how it ends, and that its user hears of it."""

from collections.abc import Sequence

import pytest

from cairn.flows import train_gpt
from cairn.storage.errors import AppendUnknown, StoreRefused, StoreUnavailable
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.policy.termination import EXIT_CODES, ExitCode, FlowOutcome
from tests.wiring.flow_in_process import RUN, FlowWorld


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
