"""Our shards are safetensors, bit for bit; what is not is refused, whatever it is."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.checkpoints import tensor_record
from cairn.storage.checkpoints.tensor_record import DTYPE_BYTES, TensorRecord, parse_shard, shard_chunks
from cairn.storage.errors import IntegrityError


def record(name: str, dtype: str, *shape: int) -> TensorRecord:
    size = int(np.prod(shape)) * DTYPE_BYTES[dtype]
    data = bytes(value % 2 if dtype == "BOOL" else value * 7 % 251 for value in range(size))
    return TensorRecord(name=name, dtype=dtype, shape=shape, data=memoryview(data))


def shard(*records: TensorRecord) -> bytes:
    return b"".join(bytes(chunk) for chunk in shard_chunks(records))


def content(records: tuple[TensorRecord, ...]) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return sorted((item.name, item.dtype, item.shape, bytes(item.data)) for item in records)


EVERYTHING = tuple(record(dtype.lower(), dtype, 2, 3) for dtype in DTYPE_BYTES)
ODD = (record("scalar", "BF16"), record("empty", "F32", 0, 4), record("ünïcode.näme", "I64", 1))


@pytest.mark.parametrize("records", [EVERYTHING, ODD, ()], ids=["every-dtype", "odd", "none"])
def test_a_shard_reads_back_as_it_was(records: tuple[TensorRecord, ...]) -> None:
    assert content(parse_shard(shard(*records), where="")) == content(records)


@pytest.mark.parametrize("records", [EVERYTHING, ODD], ids=["every-dtype", "odd"])
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


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    from safetensors.numpy import save

    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.zeros((0, 2), np.int64)}
    read = {item.name: item for item in parse_shard(save(arrays), where="")}
    assert (read["w"].shape, bytes(read["w"].data), read["n"].shape) == ((2, 3), arrays["w"].tobytes(), (0, 2))


def test_the_data_of_a_shard_begins_at_a_multiple_of_eight() -> None:
    for length in range(1, 20):
        (header,) = struct.unpack("<Q", shard(record("x" * length, "U8", 1))[:8])
        assert header % 8 == 0


def hostile(header: bytes, body: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def tensor(**changed: object) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changed}}).encode()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"1234567", id="shorter-than-a-length"),
        pytest.param(hostile(b"{}", length=2**63), id="header-longer-than-the-world"),
        pytest.param(hostile(b"{}", length=3), id="header-longer-than-the-file"),
        pytest.param(hostile(b"{}", b"rest"), id="bytes-of-no-tensor"),
        pytest.param(hostile(b"[" * 100_000), id="deep"),
        pytest.param(hostile(b'{"a":' * 50_000), id="deep-objects"),
        pytest.param(hostile(b'{"a": [[[[' + b"[" * 100_000), id="deep-value"),
        pytest.param(hostile(b"\xff\xfe"), id="not-utf-8"),
        pytest.param(hostile(tensor(), b"123"), id="cut-short"),
        pytest.param(hostile(tensor(data_offsets=[4, 8]), b"12345678"), id="hole"),
        pytest.param(hostile(tensor(data_offsets=[4, 0]), b"1234"), id="backwards"),
        pytest.param(hostile(tensor(data_offsets=[-4, 0]), b"1234"), id="negative-offset"),
        pytest.param(hostile(tensor(data_offsets=[0, 2**70]), b"1234"), id="offset-beyond-64-bits"),
        pytest.param(hostile(tensor(shape=[-1, -1]), b"1234"), id="negative-shape"),
        pytest.param(hostile(tensor(shape=[2**40, 2**40]), b"1234"), id="huge-shape"),
        pytest.param(hostile(tensor(shape=[1.5]), b"1234"), id="fractional-shape"),
        pytest.param(hostile(tensor(shape=[2**62] * 200_000), b"1234"), id="a-product-that-takes-hours"),
        pytest.param(hostile(tensor(shape=[1] * 65), b"1234"), id="more-dimensions-than-anything-reads"),
        pytest.param(hostile(tensor(shape=[0, 2**62]), b"1234"), id="nothing-with-bytes"),
        pytest.param(hostile(tensor(dtype="F64"), b"1234"), id="other-dtype-than-bytes"),
        pytest.param(hostile(tensor(data_offsets=[0, 4, 8]), b"1234"), id="three-offsets"),
        pytest.param(hostile(b'{"__metadata__": {"a": 1}}'), id="metadata-of-numbers"),
        pytest.param(hostile(b'{"__metadata__": []}'), id="metadata-list"),
        pytest.param(hostile(b'{"__metadata__": {"a": {"b": "c"}}}'), id="metadata-nested"),
        pytest.param(hostile(tensor()[:-1] + b"," + tensor()[1:], b"1234"), id="name-twice-for-the-same-bytes"),
        pytest.param(hostile(tensor().replace(b'"F32"', b'"F32", "dtype": "I32"'), b"1234"), id="dtype-twice"),
        pytest.param(hostile(b'{"__metadata__": {"a": "1", "a": "2"}}'), id="metadata-twice"),
        pytest.param(hostile(tensor(dtype="F33"), b"1234"), id="unknown-dtype"),
        pytest.param(hostile(tensor(dtype=["F32"]), b"1234"), id="dtype-of-wrong-type"),
        pytest.param(hostile(b'{"a": null}'), id="null"),
        pytest.param(hostile(tensor()[:-1] + b"," + tensor()[1:], b"12345678"), id="name-twice"),
        pytest.param(
            hostile(
                b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
                b'"b":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}}',
                b"1234",
            ),
            id="overlap",
        ),
    ],
)
def test_a_hostile_shard_is_refused_and_named(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="here"):
        parse_shard(data, where="here")


def test_a_header_beyond_the_limit_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_record, "MAX_HEADER_BYTES", 16)
    with pytest.raises(IntegrityError, match="does not fit the file or the limit"):
        parse_shard(hostile(b"{}" + b" " * 22), where="here")


def test_metadata_that_is_text_is_allowed_and_left_alone() -> None:
    assert parse_shard(hostile(b'{"__metadata__": {"format": "pt", "x": ""}}'), where="") == ()


def only_integrity_errors(data: bytes) -> None:
    try:
        records = parse_shard(data, where="here")
    except IntegrityError:
        return
    assert content(parse_shard(shard(*records), where="again")) == content(records)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
INTEGERS = st.integers(-2, 9) | st.integers()
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPE_BYTES, "X"]) | JSON,
        "shape": st.lists(INTEGERS, max_size=3) | JSON,
        "data_offsets": st.tuples(INTEGERS, INTEGERS).map(list) | JSON,
        "extra": JSON,
    },
)


@given(st.binary(max_size=64))
def test_arbitrary_bytes_raise_nothing_but_an_integrity_error(data: bytes) -> None:
    only_integrity_errors(data)


@given(st.dictionaries(st.text(max_size=4), FIELDS | JSON, max_size=4), st.binary(max_size=16))
def test_arbitrary_headers_raise_nothing_but_an_integrity_error(header: dict[str, object], body: bytes) -> None:
    only_integrity_errors(hostile(json.dumps(header).encode(), body))


@given(st.data())
def test_a_real_shard_with_any_byte_changed_or_cut_raises_nothing_but_an_integrity_error(data: st.DataObject) -> None:
    real = bytearray(shard(*EVERYTHING))
    real[data.draw(st.integers(0, len(real) - 1))] = data.draw(st.integers(0, 255))
    only_integrity_errors(bytes(real[: data.draw(st.integers(0, len(real)))]))
