"""A tensor without torch: name, dtype (as safetensors names it), shape and bytes."""

import math
from dataclasses import dataclass

from storage.errors import IntegrityError

MOST_DIMENSIONS = 64  # multiplying the lengths of a hostile header with a million dimensions would take hours
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """A named tensor over a flat buffer of little-endian values, which is not copied."""

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
