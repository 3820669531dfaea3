"""A checkpoint is used only where every byte is what the log says; where it is not, the one before is."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from safetensors import deserialize

from cairn.storage.checkpoints.checkpoint import (
    load_checkpoint,
    verify_checkpoint,
)
from cairn.storage.checkpoints.checkpoint_shard import begin_shard, cut_shards, transfers
from cairn.storage.checkpoints.payload import ManifestObject, TensorRecord, decode_manifest
from cairn.storage.errors import IntegrityError
from cairn.storage.logs.log_entry import CheckpointReference
from cairn.storage.stores.codec import encode, sha256
from cairn.storage.stores.object_store import PAGE_BYTES, ObjectStore
from tests.memory_store import MemoryStore
from tests.storage.builders import (
    STAGED_NAMES,
    commit,
    floats,
    laid_out,
    manifest_of,
    run_log,
    run_with_commits,
    stage,
    stage_records,
    trainer_document,
)


def test_a_checkpoint_has_the_objects_the_architecture_names(store: ObjectStore) -> None:
    prefix = stage(store, step=5, attempt=1).prefix
    assert store.keys(prefix) == sorted(f"{prefix}/{name}" for name in STAGED_NAMES)


def test_a_commit_repeated_after_an_unknown_outcome_appends_nothing(store: ObjectStore) -> None:
    log = run_with_commits(store, 5)
    staged = stage(store, step=10, attempt=1)
    commit(log, staged)
    before = log.seq
    commit(log, staged)
    assert log.seq == before


def test_a_staged_checkpoint_is_invisible_until_its_commit(store: ObjectStore) -> None:
    run_with_commits(store, 5)
    stage(store, step=10, attempt=1)
    assert [reference.step for reference in run_log(store).refresh().resume] == [5]


@pytest.mark.parametrize("name", STAGED_NAMES)
def test_a_staged_checkpoint_with_an_object_missing_is_not_committed(store: ObjectStore, name: str) -> None:
    log = laid_out(store, 5)
    staged = stage(store, step=10, attempt=1)
    store.delete(f"{staged.prefix}/{name}")
    with pytest.raises(IntegrityError, match=name):
        commit(log, staged)
    assert len(log.refresh().checkpoints) == 1


def test_what_is_loaded_equals_what_was_staged(store: ObjectStore) -> None:
    run_with_commits(store, 5)
    reference = run_log(store).refresh().resume[0]
    loaded = load_checkpoint(store, reference)
    tensors = {tensor.name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for tensor in loaded.tensors}
    expected = [floats("a", 5, 1, 2), floats("b", 1, 3, 4), floats("m", 5)]
    assert tensors == {tensor.name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for tensor in expected}
    assert loaded.trainer == trainer_document(5)


def test_loading_one_group_reads_no_other_shards(store: ObjectStore) -> None:
    run_with_commits(store, 5)
    reference = run_log(store).refresh().resume[0]
    store.delete(f"{reference.prefix}/optimizer-00001-of-00001.safetensors")
    assert [tensor.name for tensor in load_checkpoint(store, reference, group="weights").tensors] == ["a", "b"]


def planted(store: ObjectStore, manifest: bytes) -> CheckpointReference:
    """A reference that trusts a manifest somebody planted."""
    store.write("runs/r1/checkpoints/x/manifest.json", manifest)
    return CheckpointReference(step=5, attempt=1, prefix="runs/r1/checkpoints/x", manifest_sha256=sha256(manifest))


@pytest.mark.parametrize(
    "name", ["../secret", "..", "a/b", "/etc/passwd", "", ".hidden", "a\\b", "a\n", "UPPER", "a/../../b"]
)
def test_a_manifest_that_points_outside_its_folder_is_refused(name: str) -> None:
    store = MemoryStore()
    store.write("runs/r1/checkpoints/secret", b"x")
    shard = {"name": name, "bytes": 1, "sha256": sha256(b"x"), "header_bytes": 1, "tensors": []}
    listed = msgspec.json.decode(encode(manifest_of()))
    reference = planted(store, encode({**listed, "shards": [shard]}))
    with pytest.raises(IntegrityError, match="may not leave its folder"):
        load_checkpoint(store, reference)
    assert "may not leave its folder" in str(verify_checkpoint(store, reference)[0])


def test_a_manifest_of_a_newer_version_asks_for_an_update() -> None:
    with pytest.raises(IntegrityError, match="update cairn"):
        decode_manifest(encode(manifest_of(version=3)), where="here")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"\xff", b"[" * 100_000])
def test_a_malformed_manifest_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="here"):
        decode_manifest(data, where="here")


def test_a_manifest_with_another_trainer_document_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be trainer\.json"):
        manifest_of(trainer=ManifestObject(name="weights", bytes=1, sha256=""))


def test_a_manifest_of_another_step_than_the_log_says_is_refused(store: ObjectStore) -> None:
    with pytest.raises(IntegrityError, match="step 6"):
        load_checkpoint(store, planted(store, encode(manifest_of(step=6))))


def test_an_object_of_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        ManifestObject(name="a", bytes=-1, sha256="")


@pytest.mark.parametrize(("shard_bytes", "shards"), [(1, 4), (12, 4), (24, 2), (36, 2), (48, 1), (1 << 30, 1)], ids=str)
def test_a_group_is_cut_into_shards_no_larger_than_asked_unless_one_tensor_is(shard_bytes: int, shards: int) -> None:
    store = MemoryStore()
    records = tuple(floats(name, 1, 2, 3) for name in "abcd")
    prefix = stage_records(store, *records, shard_bytes=shard_bytes).prefix
    keys = [key for key in store.keys(prefix) if key.endswith(".safetensors")]
    sizes = [sum(len(tensor["data"]) for _, tensor in deserialize(store.read(key))) for key in keys]
    assert len(keys) == shards
    assert all(size <= max(shard_bytes, 12) for size in sizes)


def test_tensors_of_whole_pages_begin_with_a_page_of_their_shard() -> None:
    sizes = {"a": 1, "b": PAGE_BYTES, "c": 5000, "d": 3 * PAGE_BYTES, "e": 0}
    records = [
        TensorRecord(name=name, dtype="U8", shape=(size,), data=memoryview(bytes(size))) for name, size in sizes.items()
    ]
    for shard in cut_shards(records, shard_bytes=5 * PAGE_BYTES):
        with transfers(1) as run:
            written = begin_shard(run, run, MemoryStore(), "p/shard", shard)()
        places = {tensor.name: place for tensor, place in written.placed()}
        assert {place % PAGE_BYTES for name, place in places.items() if name in "bd"} <= {0}


class WaitingStore(MemoryStore):
    """Takes nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        assert self.may.wait(240)
        return super().write_stream(key, chunks)


def test_a_shard_is_hashed_while_the_store_takes_it() -> None:
    store = WaitingStore()

    def digest(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        found = function(*arguments)
        store.may.set()
        return lambda: found

    with transfers(2) as write:
        written = begin_shard(write, digest, store, "p/shard", [floats("a", 1, 2, 3)])()
    assert written.bytes == store.size("p/shard")


def test_the_state_digest_does_not_depend_on_the_sharding(store: ObjectStore) -> None:
    digests = {stage(store, step=5, attempt=1, shard_bytes=size).state_sha256 for size in (1, 16, 1 << 20)}
    assert len(digests) == 1


def test_a_tensor_larger_than_a_chunk_survives_the_way_through_the_store(store: ObjectStore) -> None:
    data = bytes(range(256)) * (9 * 4096)
    record = TensorRecord(name="big", dtype="U8", shape=(len(data),), data=memoryview(data))
    staged = stage_records(store, record)
    ((_, tensor),) = deserialize(store.read(f"{staged.prefix}/weights-00001-of-00001.safetensors"))
    assert tensor["data"] == data


@pytest.mark.parametrize("shapes", [[(0, 4)], []], ids=["an empty tensor", "no tensor"])
def test_a_group_without_numbers_is_still_a_checkpoint(store: ObjectStore, shapes: list[tuple[int, ...]]) -> None:
    empty = [TensorRecord(name="none", dtype="F32", shape=shape, data=memoryview(b"")) for shape in shapes]
    assert [tensor.shape for tensor in load_checkpoint(store, stage_records(store, *empty)).tensors] == shapes
