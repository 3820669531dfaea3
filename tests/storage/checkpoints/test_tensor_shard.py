"""Our shards are safetensors, and two states are equal exactly when their digests are, bit for bit."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.checkpoints.payload import NUMPY_TYPES, TensorRecord, shard_chunks, state_sha256
from cairn.storage.errors import IntegrityError
from tests.storage.builders import floats


def record(name: str, dtype: str, *shape: int) -> TensorRecord:
    size = int(np.prod(shape)) * np.dtype(NUMPY_TYPES[dtype]).itemsize
    data = bytes(value % 2 if dtype == "BOOL" else value * 7 % 251 for value in range(size))
    return TensorRecord(name=name, dtype=dtype, shape=shape, data=memoryview(data))


def shard(*records: TensorRecord) -> bytes:
    return b"".join(bytes(chunk) for chunk in shard_chunks(records))


def content(records: tuple[TensorRecord, ...]) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return sorted((item.name, item.dtype, item.shape, bytes(item.data)) for item in records)


EVERYTHING = tuple(record(dtype.lower(), dtype, 2, 3) for dtype in NUMPY_TYPES)
ODD = (record("scalar", "BF16"), record("empty", "F32", 0, 4), record("ünïcode.näme", "I64", 1))


@pytest.mark.parametrize("records", [EVERYTHING, ODD, ()], ids=["every-dtype", "odd", "none"])
def test_the_safetensors_library_reads_our_shard_bit_for_bit(records: tuple[TensorRecord, ...]) -> None:
    from safetensors import deserialize

    found: list[tuple[str, dict[str, Any]]] = deserialize(shard(*records))
    read = sorted((name, item["dtype"], tuple(item["shape"]), bytes(item["data"])) for name, item in found)
    assert read == content(records)


def test_torch_reads_our_bfloat16_and_empty_tensors_bit_for_bit() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load

    tensors = load(shard(record("a", "BF16", 3, 2), record("b", "F32", 0, 4)))
    assert tensors["a"].dtype == torch.bfloat16
    assert bytes(tensors["a"].view(torch.uint8).numpy()) == bytes(record("a", "BF16", 3, 2).data)
    assert tuple(tensors["b"].shape) == (0, 4)


def test_the_data_of_a_shard_begins_at_a_multiple_of_eight() -> None:
    for length in range(1, 20):
        (header,) = struct.unpack("<Q", shard(record("x" * length, "U8", 1))[:8])
        assert header % 8 == 0


def raw(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> TensorRecord:
    return TensorRecord(name=name, dtype=dtype, shape=shape, data=memoryview(data))


BASE = raw("w", "F32", (2, 1), struct.pack("<2f", 1, 2))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(raw("v", "F32", (2, 1), bytes(BASE.data)), id="name"),
        pytest.param(raw("w", "I32", (2, 1), bytes(BASE.data)), id="dtype"),
        pytest.param(raw("w", "F32", (1, 2), bytes(BASE.data)), id="shape"),
        pytest.param(raw("w", "F32", (2,), bytes(BASE.data)), id="rank"),
        pytest.param(raw("w", "F32", (2, 1), bytes(8)), id="bytes"),
    ],
)
def test_the_digest_changes_with(other: TensorRecord) -> None:
    assert state_sha256([other]) != state_sha256([BASE])


@given(st.integers(0, 63))
def test_the_digest_changes_with_any_flipped_bit(bit: int) -> None:
    data = bytearray(BASE.data)
    data[bit // 8] ^= 1 << bit % 8
    assert state_sha256([raw("w", "F32", (2, 1), bytes(data))]) != state_sha256([BASE])


@given(st.permutations([floats("a", 1), floats("b", 2), floats("c", 3)]))
def test_the_digest_does_not_depend_on_the_order(records: list[TensorRecord]) -> None:
    assert state_sha256(records) == state_sha256(sorted(records, key=lambda record: record.name))


def test_a_tensor_more_is_another_state() -> None:
    assert state_sha256([BASE]) != state_sha256([BASE, raw("x", "F32", (0,), b"")])


def test_the_digest_of_a_known_state_never_changes() -> None:
    assert state_sha256([BASE]) == "eebd7e963a7242c9116a6309ac09a961ba3c29d5c096be360c5d4a76220fcf94"


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [("F99", (1,), b"1234"), ("F32", (2,), b"1234"), ("F32", (-1, -1), b"1234")],
    ids=["dtype", "size", "negative"],
)
def test_a_record_that_does_not_fit_together_is_refused(dtype: str, shape: tuple[int, ...], data: bytes) -> None:
    with pytest.raises(IntegrityError, match="tensor w"):
        raw("w", dtype, shape, data)
