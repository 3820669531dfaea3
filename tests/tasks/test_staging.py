"""Staging outlives a store that is away, and holds one checkpoint at a time."""

import threading
from collections.abc import Iterable

import torch

from cairn.model.training.train_state import NamedTensor
from cairn.storage.errors import StoreRefused, StoreUnavailable
from tests.memory_store import MemoryStore
from tests.tasks.stagings import Stagings


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


def tensors(step: int) -> tuple[NamedTensor, ...]:
    return (NamedTensor(name="a", group="weights", tensor=torch.tensor([float(step)])),)


def test_a_store_that_is_away_for_a_while_costs_time_not_the_checkpoint() -> None:
    stagings = Stagings(AwayStore(2, StoreUnavailable("503 SlowDown")))
    stagings.stage(tensors(5), 5)
    stagings.staging.wait()
    assert [staged.step for staged in stagings.staged] == [5]
    assert stagings.waiting.count("503 SlowDown") == 2


def test_patience_that_runs_out_fails_with_the_stores_own_words() -> None:
    stagings = Stagings(AwayStore(99, StoreUnavailable("503 SlowDown")), patience_seconds=0.4)
    stagings.stage(tensors(5), 5)
    stagings.staging.wait()
    assert stagings.failed == ["503 SlowDown"]


def test_a_refusal_is_not_asked_again() -> None:
    stagings = Stagings(store := AwayStore(99, StoreRefused("AccessDenied")))
    stagings.stage(tensors(5), 5)
    stagings.staging.wait()
    assert (store.times, stagings.failed) == (98, ["AccessDenied"])


def test_the_next_checkpoint_waits_for_the_one_under_way() -> None:
    stagings, gate, order = Stagings(MemoryStore()), threading.Event(), list[str]()

    def slow() -> None:
        gate.wait()
        order.append("first")

    stagings.stage(tensors(5), 5, before=slow)
    threading.Timer(0.05, gate.set).start()
    stagings.stage(tensors(10), 10, before=lambda: order.append("second"))
    stagings.staging.wait()
    assert order == ["first", "second"]
    assert [staged.step for staged in stagings.staged] == [5, 10]
