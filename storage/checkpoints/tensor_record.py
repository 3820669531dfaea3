"""A tensor without torch, and `state_sha256`: the digest of a train state, the same for every sharding and world size.

It covers name, dtype, shape and bytes in name order, length-prefixed: different states never give equal strings.
"""

import hashlib
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from storage.errors import IntegrityError

_TITLE = b"cairn train state 1\n"
MOST_DIMENSIONS = 64  # multiplying the lengths of a hostile header with a million dimensions would take hours
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """A named tensor (dtype as in safetensors) over a flat buffer of little-endian values, which is not copied."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise IntegrityError(f"tensor {self.name}: dtype {self.dtype!r} must be one of {sorted(DTYPE_BYTES)}")
        if len(self.shape) > MOST_DIMENSIONS:
            raise IntegrityError(f"tensor {self.name}: {len(self.shape):,} dimensions, at most {MOST_DIMENSIONS}")
        if any(length < 0 for length in self.shape):
            raise IntegrityError(f"tensor {self.name}: shape {self.shape}: no length may be negative")
        expected = math.prod(self.shape) * DTYPE_BYTES[self.dtype]
        if self.data.nbytes != expected:
            raise IntegrityError(f"tensor {self.name}: {self.data.nbytes} bytes, its shape and dtype need {expected}")


def state_sha256(records: Iterable[TensorRecord]) -> str:
    """Return the hex digest, equal if and only if the bits are; records in name order are digested as they arrive."""
    digest, seen, ordered = hashlib.sha256(_TITLE), list[TensorRecord](), True
    for record in records:
        ordered = ordered and not (seen and record.name < seen[-1].name)
        seen.append(record)
        if ordered:
            _update(digest, record)
    if ordered:
        return digest.hexdigest()
    digest = hashlib.sha256(_TITLE)
    for record in sorted(seen, key=lambda record: record.name):
        _update(digest, record)
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", record: TensorRecord) -> None:
    for text in (record.name, record.dtype, ",".join(map(str, record.shape))):
        encoded = text.encode()
        digest.update(struct.pack("<Q", len(encoded)) + encoded)
    digest.update(struct.pack("<Q", record.data.nbytes))
    digest.update(record.data)
