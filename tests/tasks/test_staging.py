"""Staging outlives a store that is away, and holds one checkpoint at a time."""

import threading
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from cairn.model.training.train_state import NamedTensor
from cairn.storage.checkpoints.checkpoint import checkpoint_target
from cairn.storage.errors import StoreRefused, StoreUnavailable
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.tasks.trainer.staging import HostCheckpoint, Staging
from cairn.tasks.trainer.trainer_protocol import Waiting
from tests.memory_store import MemoryStore
from tests.storage.builders import RUN, trainer_document


class AwayStore(MemoryStore):
    """Refuses the first `times` uploads."""

    def __init__(self, times: int, error: StoreUnavailable) -> None:
        super().__init__()
        self.times, self.error = times, error

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        if self.times > 0 and "weights" in key:
            self.times -= 1
            raise self.error
        return super().write_stream(key, chunks)


class Heard:
    """What was reported."""

    def __init__(self) -> None:
        self.staged: list[StagedCheckpoint] = []
        self.waiting: list[str] = []
        self.failed: list[Exception] = []

    def add(self, event: StagedCheckpoint | Waiting) -> None:
        if isinstance(event, Waiting):
            self.waiting.append(event.why)
        else:
            self.staged.append(event)


def host_checkpoint(step: int) -> HostCheckpoint:
    return HostCheckpoint(
        target=checkpoint_target(RUN, step=step, attempt=1),
        tensors=(NamedTensor(name="a", group="weights", tensor=torch.tensor([float(step)])),),
        document=trainer_document(step),
    )


def test_a_store_that_is_away_for_a_while_costs_time_not_the_checkpoint() -> None:
    heard = Heard()
    staging = Staging(
        AwayStore(2, StoreUnavailable("503 SlowDown")), heard.add, heard.failed.append, patience_seconds=60
    )
    staging.begin(host_checkpoint(5), before=lambda: None)
    staging.wait()
    assert [staged.step for staged in heard.staged] == [5]
    assert heard.waiting.count("503 SlowDown") == 2


def test_patience_that_runs_out_fails_with_the_stores_own_words() -> None:
    heard = Heard()
    staging = Staging(
        AwayStore(99, StoreUnavailable("503 SlowDown")), heard.add, heard.failed.append, patience_seconds=0.4
    )
    staging.begin(host_checkpoint(5), before=lambda: None)
    staging.wait()
    assert [str(error) for error in heard.failed] == ["503 SlowDown"]


def test_a_refusal_is_not_asked_again() -> None:
    heard = Heard()
    store = AwayStore(99, StoreRefused("AccessDenied"))
    staging = Staging(store, heard.add, heard.failed.append, patience_seconds=60)
    staging.begin(host_checkpoint(5), before=lambda: None)
    staging.wait()
    assert (store.times, [str(error) for error in heard.failed]) == (98, ["AccessDenied"])


def test_the_next_checkpoint_waits_for_the_one_under_way() -> None:
    heard, gate, order = Heard(), threading.Event(), list[str]()
    staging = Staging(MemoryStore(), heard.add, heard.failed.append, patience_seconds=60)

    def slow() -> None:
        gate.wait()
        order.append("first")

    staging.begin(host_checkpoint(5), before=slow)
    threading.Timer(0.05, gate.set).start()
    staging.begin(replace(host_checkpoint(10)), before=lambda: order.append("second"))
    staging.wait()
    assert order == ["first", "second"]
    assert [staged.step for staged in heard.staged] == [5, 10]


@pytest.mark.parametrize("step", [5, 10])
def test_what_is_staged_names_its_step(step: int) -> None:
    heard = Heard()
    staging = Staging(MemoryStore(), heard.add, heard.failed.append, patience_seconds=60)
    staging.begin(host_checkpoint(step), before=lambda: None)
    staging.wait()
    assert heard.staged[0].step == step
