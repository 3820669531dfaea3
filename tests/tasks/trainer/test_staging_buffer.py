"""The staging buffer is one block of memory, reused, and holds exactly the state's bits.

Staging outlives a store that is away, and holds one checkpoint at a time.
"""

import subprocess
import sys
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.training.train_state import NamedTensor, TrainState
from cairn.storage.checkpoints.payload import state_sha256
from cairn.storage.errors import StoreRefused, StoreUnavailable
from cairn.storage.stores.object_store import PAGE_BYTES
from cairn.tasks.trainer.staging_buffer import StagingBuffer
from cairn.tasks.trainer.tensor_exchange import to_record
from cairn.tasks.trainer.training_setup import CheckpointLoad
from tests.memory_store import MemoryStore
from tests.processes.fork_server import fork_server
from tests.tasks.stagings import Stagings

CPU = torch.device("cpu")
MODEL = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=8)


def fresh_state() -> TrainState:
    training = TrainingConfig(steps=4, global_batch=2, warmup_steps=1, precision="fp32", kernels="stock")
    return TrainState.create(MODEL, training, 61, CPU)


def disturb(state: TrainState) -> None:
    """Change every weight and moment, as a step would."""
    for named in state.live_tensors():
        if named.group != "trainer":
            named.tensor.add_(1)


def bits(tensors: Iterable[NamedTensor]) -> list[tuple[str, str, bytes]]:
    return [(named.name, named.group, named.tensor.numpy().tobytes()) for named in tensors]


class SlowStore(MemoryStore):
    """Uploads wait until they may begin, and read what they upload only then."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = threading.Event(), threading.Event()

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        self.asked.set()
        assert self.may.wait(240)
        return super().write_stream(key, chunks)


def test_a_copy_holds_the_bits_of_the_state() -> None:
    state = fresh_state()
    disturb(state)
    assert bits(StagingBuffer(CPU).copy(state.live_tensors())) == bits(state.named_tensors())


def test_two_copies_lie_at_the_same_addresses() -> None:
    state, host = fresh_state(), StagingBuffer(CPU)
    host.prepare(state.live_tensors())
    first = [named.tensor.data_ptr() for named in host.copy(state.live_tensors())]
    disturb(state)
    assert [named.tensor.data_ptr() for named in host.copy(state.live_tensors())] == first


def test_a_copy_does_not_change_with_the_state() -> None:
    state, host = fresh_state(), StagingBuffer(CPU)
    copies = host.copy(state.live_tensors())
    before = bits(copies)
    disturb(state)
    assert bits(copies) == before


def test_memory_prepared_for_a_state_is_all_that_copies_of_it_take() -> None:
    state, host = fresh_state(), StagingBuffer(CPU)
    host.prepare(state.live_tensors())
    prepared = host.bytes
    host.copy(state.live_tensors())
    assert 0 < prepared == host.bytes


def test_each_copy_begins_with_a_page() -> None:
    copies = StagingBuffer(CPU).copy(fresh_state().live_tensors())
    assert {named.tensor.data_ptr() % PAGE_BYTES for named in copies} == {0}


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65])
def test_tensors_of_any_size_share_a_block(size: int) -> None:
    tensors = [
        NamedTensor(name="a", group="weights", tensor=torch.arange(size, dtype=torch.uint8)),
        NamedTensor(name="b", group="weights", tensor=torch.tensor(1.5, dtype=torch.float64)),
        NamedTensor(name="c", group="weights", tensor=torch.ones(3, 2, dtype=torch.bfloat16).t()),
    ]
    copies = StagingBuffer(CPU).copy(tensors)
    assert all(torch.equal(copy.tensor, named.tensor) for copy, named in zip(copies, tensors, strict=True))


def test_a_checkpoint_on_its_way_up_is_never_overwritten_by_the_next_copy() -> None:
    state, stagings = fresh_state(), Stagings(store := SlowStore())
    copies = stagings.staging.copy(state.live_tensors())
    promised = state_sha256(to_record(named.name, named.tensor) for named in copies)
    stagings.stage(copies, 5)
    assert store.asked.wait(240)
    disturb(state)
    next_copy = threading.Thread(target=partial(stagings.staging.copy, state.live_tensors()))
    next_copy.start()
    next_copy.join(0.1)
    assert next_copy.is_alive()
    store.may.set()
    next_copy.join()
    assert stagings.loaded(0).manifest.state_sha256 == promised


def test_checkpoints_from_the_same_memory_are_each_the_state_of_their_step() -> None:
    state, stagings, promised = fresh_state(), Stagings(MemoryStore()), list[str]()
    for step in (5, 10, 15):
        disturb(state)
        promised.append(state_sha256(to_record(named.name, named.tensor) for named in state.named_tensors()))
        stagings.stage(stagings.staging.copy(state.live_tensors()), step)
    stagings.staging.wait()
    assert [stagings.loaded(number).manifest.state_sha256 for number in range(3)] == promised


def test_a_checkpoint_is_read_into_the_tensors_of_the_state_itself() -> None:
    state, stagings = fresh_state(), Stagings(MemoryStore())
    disturb(state)
    stagings.stage(stagings.staging.copy(state.live_tensors()), 0)
    stagings.staging.wait()
    other = fresh_state()
    places = [named.tensor.data_ptr() for named in other.live_tensors() if named.group != "trainer"]
    assert CheckpointLoad(stagings.store, stagings.staged[0]).into(other) == stagings.loaded(0).manifest.state_sha256
    assert bits(other.named_tensors()) == bits(state.named_tensors())
    assert places == [named.tensor.data_ptr() for named in other.live_tensors() if named.group != "trainer"]


@pytest.mark.linux  # reads /proc
def test_staging_and_resuming_take_the_memory_of_one_state_beside_the_state(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.tasks.staging_memory", str(tmp_path)]
    with fork_server().popen(command, stdout=subprocess.PIPE) as process:
        said, _ = process.communicate(timeout=240)
    staging, resuming = map(float, said.split())
    assert staging < 1.25
    assert resuming < 1.45


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
