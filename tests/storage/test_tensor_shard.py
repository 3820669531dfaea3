"""Our shards are safetensors, bit for bit."""

import struct
from typing import Any

import numpy as np
import pytest

from cairn.storage.checkpoints.payload import NUMPY_TYPES, TensorRecord, shard_chunks


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
