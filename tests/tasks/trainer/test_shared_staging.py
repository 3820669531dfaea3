"""A checkpoint of several writers: the same digest as one writer's, and anybody reads it."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.training.parallel import Ranks
from cairn.model.training.train_state import NamedTensor, TrainState
from cairn.storage.checkpoints.checkpoint import (
    CheckpointTarget,
    UploadOptions,
    load_checkpoint,
    stage_checkpoint,
    stage_share,
)
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.trainer.staging import SharedStaging, WriterLost, assign_writers
from cairn.tasks.trainer.staging_buffer import StagingBuffer
from cairn.tasks.trainer.tensor_exchange import to_group
from tests.tasks.stagings import document_of

WRITERS = 3
PREFIX = "runs/r/checkpoints/step-00000000-attempt-0001"


class QueuedRendezvous:
    """What ranks leave each other, in this process."""

    def __init__(self) -> None:
        self._left: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, name: str, data: bytes) -> None:
        with self._changed:
            self._left[name] = data
            self._changed.notify_all()

    def get(self, name: str, *, timeout_seconds: float) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._left, timeout=max(240, timeout_seconds))
            return self._left[name]


@pytest.fixture(scope="module")
def tensors() -> tuple[NamedTensor, ...]:
    config = TrainingConfig(steps=3, global_batch=4, precision="fp32", kernels="stock")
    shape = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=8)
    return TrainState.create(shape, config, 65, torch.device("cpu")).live_tensors()


def stage_by_one(store: LocalStore, tensors: tuple[NamedTensor, ...]) -> StagedCheckpoint:
    groups = (to_group("weights", tensors), to_group("optimizer", tensors))
    return stage_checkpoint(
        store,
        target=CheckpointTarget(run_id="r", attempt=1, prefix=PREFIX),
        groups=groups,
        trainer=document_of(tensors),
        uploads=UploadOptions(at_once=2),
    )


def stage_by_several(store: LocalStore, tensors: tuple[NamedTensor, ...]) -> StagedCheckpoint:
    rendezvous: Any = QueuedRendezvous()
    shares = [SharedStaging(Ranks(rank, WRITERS), rendezvous, tensors) for rank in range(WRITERS)]
    copies = [StagingBuffer(torch.device("cpu")).copy(tensors, share.writer, share.ranks.rank) for share in shares]
    for share, own in list(zip(shares, copies, strict=True))[1:]:
        groups = (to_group("weights", own), to_group("optimizer", own))
        rank = share.ranks.rank
        share.publish_shards("0", stage_share(store, prefix=PREFIX, groups=groups, writer=rank, writers=WRITERS))
    own, first = copies[0], shares[0]
    groups = (to_group("weights", own), to_group("optimizer", own))
    return stage_checkpoint(
        store,
        target=CheckpointTarget(run_id="r", attempt=1, prefix=PREFIX),
        groups=groups,
        trainer=document_of(own),
        writers=WRITERS,
        others=partial(first.other_shards, "0", range(WRITERS)),
    )


def test_the_split_gives_every_tensor_one_writer_and_every_writer_about_as_much(
    tensors: tuple[NamedTensor, ...],
) -> None:
    writers = assign_writers(tensors, WRITERS)
    assert writers.keys() == {named.name for named in tensors}
    assert {writers[named.name] for named in tensors if named.group == "trainer"} == {0}
    shares = [sum(named.tensor.nbytes for named in tensors if writers[named.name] == rank) for rank in range(WRITERS)]
    assert max(shares) < 2 * min(shares)
    assert set(assign_writers(tensors, 1).values()) == {0}


def test_several_writers_stage_the_state_that_one_would(tensors: tuple[NamedTensor, ...], tmp_path: Path) -> None:
    one, several = LocalStore(tmp_path / "one"), LocalStore(tmp_path / "several")
    alone, shared = stage_by_one(one, tensors), stage_by_several(several, tensors)
    assert shared.state_sha256 == alone.state_sha256
    loaded = {record.name: bytes(record.data) for record in load_checkpoint(several, shared).tensors}
    expected = {named.name: named.tensor.numpy().tobytes() for named in tensors if named.group != "trainer"}
    assert loaded == expected


class OneWriter(QueuedRendezvous):
    """A rendezvous where a writer writes nothing, and is lost once it was named as late."""

    def get(self, name: str, *, timeout_seconds: float) -> bytes:
        return b""

    def has_lost(self, rank: int) -> bool:
        return self._left.get("late") == f"[{rank}]".encode()


def test_a_writer_that_takes_longer_than_the_limit_is_named_and_its_checkpoint_is_lost_with_it(
    tensors: tuple[NamedTensor, ...],
) -> None:
    rendezvous: Any = OneWriter()
    first = SharedStaging(Ranks(0, 2), rendezvous, tensors)
    with pytest.raises(WriterLost, match="rank 1"):
        first.other_shards("0", range(2), limit_seconds=0.0)
    assert rendezvous._left == {"late": b"[1]"}


def test_weights_alone_can_be_read_whoever_wrote_them(tensors: tuple[NamedTensor, ...], tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    staged = stage_by_several(store, tensors)
    names = {record.name for record in load_checkpoint(store, staged, group="weights").tensors}
    assert names == {named.name for named in tensors if named.group == "weights"}


def test_the_safetensors_library_opens_every_shard_of_every_writer(
    tensors: tuple[NamedTensor, ...], tmp_path: Path
) -> None:
    stage_by_several(LocalStore(tmp_path), tensors)
    files = sorted((tmp_path / PREFIX).glob("*.safetensors"))
    assert {file.name.partition("writer-")[2][0] for file in files} == {"1", "2", "3"}
    opened = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = {named.name: named.tensor for named in tensors if named.group != "trainer"}
    assert opened.keys() == expected.keys()
    assert all(torch.equal(opened[name], tensor) for name, tensor in expected.items())
