"""Parts of a checkpoint's tensors are read by ranges, and whoever reads a byte that has changed is told."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.storage.checkpoints.checkpoint import (
    load_checkpoint,
    open_checkpoint,
    read_tensors,
    verify_checkpoint,
)
from cairn.storage.checkpoints.checkpoint_shard import ReadPolicy, WantedBytes, shard_sha256
from cairn.storage.checkpoints.payload import (
    CHUNK_BYTES,
    ManifestShard,
    TensorDigest,
    TensorRecord,
    decode_manifest,
    shard_header,
)
from cairn.storage.errors import IntegrityError, ObjectDamaged, ObjectMissing
from cairn.storage.logs.run_entries import StagedCheckpoint
from cairn.storage.stores.codec import MAX_DOCUMENT_BYTES, encode, sha256
from tests.memory_store import MemoryStore
from tests.storage.builders import floats, manifest_of, no_sleep, stage, stage_records

ONE_READ = ReadPolicy(tries=1)
QUICK = ReadPolicy(sleep=no_sleep)
BIG = np.random.default_rng(1).integers(0, 256, 2 * CHUNK_BYTES + 12_345, dtype=np.uint8)


@dataclass
class CountedStore(MemoryStore):
    """Remembers the ranges it was asked for, and gives each of the first `wrong` with a flipped bit."""

    wrong: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        filled = super().read_range(key, start, into)
        self.ranges.append((start, into.nbytes))
        if self.wrong:
            self.wrong -= 1
            into[0] ^= 1
        return filled


@pytest.fixture(scope="module")
def staged_big() -> tuple[CountedStore, StagedCheckpoint]:
    """A tensor of three chunks between two small ones."""
    store = CountedStore()
    record = TensorRecord(name="big", dtype="U8", shape=(len(BIG),), data=memoryview(BIG.data))
    return store, stage_records(store, floats("a", 1, 2), record, floats("c", 3))


@pytest.fixture
def big(
    staged_big: tuple[CountedStore, StagedCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> tuple[CountedStore, StagedCheckpoint]:
    """The same, which several threads read."""
    monkeypatch.setattr("cairn.storage.checkpoints.checkpoint._LARGE_BYTES", 0)
    return staged_big


def test_one_flipped_bit_anywhere_in_a_checkpoint_is_found_by_whoever_loads_it() -> None:
    store = MemoryStore()
    reference = stage(store, step=5, attempt=1, shard_bytes=1 << 20)
    positions = 0
    for key in store.keys(reference.prefix):
        sound = store.read(key)
        for position in range(len(sound)):
            flipped = bytearray(sound)
            flipped[position] ^= 1 << position % 8
            store.write(key, bytes(flipped))
            with pytest.raises(IntegrityError, match=key.rsplit("/", 1)[1]):
                load_checkpoint(store, reference, read_policy=ONE_READ)
            positions += 1
        store.write(key, sound)
    assert load_checkpoint(store, reference).trainer.step == 5 and positions > 1000


@pytest.mark.parametrize("position", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 5])
def test_damage_is_told_with_object_tensor_and_bytes(big: tuple[CountedStore, StagedCheckpoint], position: int) -> None:
    store, reference = MemoryStore(), big[1]
    store._objects.update(big[0]._objects)
    key = "runs/r1/checkpoints/p/weights-00001-of-00001.safetensors"
    changed = bytearray(store.read(key))
    changed[changed.index(BIG.tobytes()[:64]) + position] ^= 1
    store.write(key, bytes(changed))
    first = position // CHUNK_BYTES * CHUNK_BYTES
    (damage,) = verify_checkpoint(store, reference)
    assert damage.key == key and f"for bytes {first} to {min(first + CHUNK_BYTES, len(BIG))} of big" in damage.found
    with pytest.raises(ObjectDamaged, match="of big"):
        load_checkpoint(store, reference, read_policy=ONE_READ)


@settings(max_examples=12)
@given(st.data())
def test_any_range_of_a_tensor_is_read_as_it_was_written(
    staged_big: tuple[CountedStore, StagedCheckpoint], data: st.DataObject
) -> None:
    edges = st.sampled_from([0, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, len(BIG)])
    begin, end = sorted([data.draw(edges | st.integers(0, len(BIG))), data.draw(edges)])
    store, reference = staged_big
    memory, taken = bytearray(end - begin), bytearray(end - begin)

    def take(start: int, piece: memoryview) -> None:
        taken[start : start + len(piece)] = piece

    opened = open_checkpoint(store, reference)
    into_memory = WantedBytes(name="big", begin=begin, end=end, memory=memoryview(memory))
    for wanted in (into_memory, replace(into_memory, memory=None, take=take)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cairn.storage.checkpoints.checkpoint._LARGE_BYTES", 0)  # several threads read
            read_tensors(store, opened, [wanted])
    assert memory == taken == BIG.data[begin:end]


def test_a_reader_asks_for_the_header_and_the_chunks_it_needs_and_for_no_others(
    big: tuple[CountedStore, StagedCheckpoint],
) -> None:
    store, reference = big
    opened = open_checkpoint(store, reference)
    store.ranges.clear()
    part = WantedBytes(name="big", begin=CHUNK_BYTES + 5, end=CHUNK_BYTES + 6, memory=memoryview(bytearray(1)))
    read_tensors(store, opened, [part])
    header = opened.manifest.shards[0].header_bytes
    assert sorted(store.ranges) == [(0, header), (header + 8 + CHUNK_BYTES, CHUNK_BYTES)]


def test_small_tensors_side_by_side_are_read_in_one_request() -> None:
    store = CountedStore()
    staged = stage_records(store, *(floats(f"w{n:03}", n) for n in range(200)))
    loaded = load_checkpoint(store, staged)
    assert [bytes(item.data) for item in loaded.tensors] == [bytes(floats("", n).data) for n in range(200)]
    assert len(store.ranges) == 2


@pytest.mark.parametrize("wrong", [1, 2])
def test_what_reads_right_at_a_later_look_is_used(wrong: int) -> None:
    store = CountedStore()
    reference = stage(store, step=5, attempt=1)
    store.wrong = wrong
    assert load_checkpoint(store, reference, read_policy=QUICK).trainer.step == 5


def test_what_fails_three_looks_is_damaged() -> None:
    store = CountedStore()
    reference = stage(store, step=5, attempt=1)
    store.wrong = 3
    with pytest.raises(ObjectDamaged, match=r"safetensors: sha256 of header"):
        load_checkpoint(store, reference, read_policy=QUICK)


def test_a_header_that_names_other_tensors_than_the_manifest_is_refused() -> None:
    store = MemoryStore()
    reference = stage(store, step=5, attempt=1)
    manifest = decode_manifest(store.read(f"{reference.prefix}/manifest.json"), where="")
    first, *others = manifest.shards
    key = f"{reference.prefix}/{first.name}"
    header = shard_header([replace(floats("z", 0, 0, 0), name="z")])
    store.write(key, header + store.read(key)[first.header_bytes :])
    digest = shard_sha256(header, [tensor.chunks for tensor in first.tensors])
    size = first.bytes - first.header_bytes + len(header)
    forged = replace(first, header_bytes=len(header), bytes=size, sha256=digest)
    data = encode(replace(manifest, shards=(forged, *others)))
    store.write(f"{reference.prefix}/manifest.json", data)
    with pytest.raises(IntegrityError, match="is not that of the tensors in the manifest"):
        load_checkpoint(store, replace(reference, manifest_sha256=sha256(data)), read_policy=ONE_READ)


@pytest.mark.parametrize("change", [lambda data: data + b"\0", lambda data: data[:-1]], ids=["longer", "shorter"])
def test_a_shard_of_another_size_is_refused(change: Callable[[bytes], bytes]) -> None:
    store = MemoryStore()
    reference = stage(store, step=5, attempt=1)
    key = next(key for key in store.keys(reference.prefix) if "weights" in key)
    store.write(key, change(store.read(key)))
    with pytest.raises(ObjectDamaged, match="bytes, must be"):
        load_checkpoint(store, reference, read_policy=ONE_READ)


@dataclass
class FickleStore(MemoryStore):
    """Has every object until its bytes are asked for; then it has one byte of it, or nothing."""

    is_gone: bool

    def __post_init__(self) -> None:
        super().__init__()

    def read_range(self, key: str, start: int, into: memoryview) -> int:
        if self.is_gone:
            raise ObjectMissing(key)
        return super().read_range(key, start, into[:1])


@pytest.mark.parametrize(("is_gone", "found"), [(True, "missing"), (False, "1 bytes from 0 on, where")])
def test_a_shard_that_vanishes_or_shrinks_while_it_is_read_is_damaged(is_gone: bool, found: str) -> None:
    store = FickleStore(is_gone=is_gone)
    with pytest.raises(ObjectDamaged) as damaged:
        load_checkpoint(store, stage(store, step=5, attempt=1), read_policy=ONE_READ)
    assert damaged.value.found.startswith(found)


def test_the_manifest_of_seventy_billion_parameters_is_a_document_that_is_read() -> None:
    layers, width, vocabulary = 80, 8192, 128_000
    matrices = [(vocabulary, width), *[(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)] * 80]
    tensors = [
        TensorDigest(
            name=f"optimizer.h.{number}.attn.c_attn.weight.exp_avg_{kind}",
            dtype="F32",
            shape=shape,
            chunks=np.random.default_rng(number).bytes(-(-4 * shape[0] * shape[1] // CHUNK_BYTES) * 32),
        )
        for kind in range(3)
        for number, shape in enumerate(matrices)
    ]
    shards = tuple(
        ManifestShard(name=f"shard-{n}", bytes=8 + item.bytes, sha256="0" * 64, header_bytes=8, tensors=(item,))
        for n, item in enumerate(tensors)
    )
    manifest = manifest_of(shards=shards)
    data = encode(manifest)
    assert sum(item.bytes for item in tensors) > 12 * 65e9 and layers
    assert len(data) < MAX_DOCUMENT_BYTES / 2
    assert decode_manifest(data, where="here") == manifest
