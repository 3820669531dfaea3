"""Two states are equal bit for bit exactly when their digests are."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.checkpoints.payload import TensorRecord, state_sha256
from cairn.storage.errors import IntegrityError
from tests.storage.builders import floats


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
