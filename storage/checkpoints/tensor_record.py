"""A tensor without torch, the digests of its chunks, and `state_sha256`, the same for every sharding and world size.

A tensor is hashed in chunks of a fixed size, so that several threads can hash it and a part of it can be verified.
The state's digest covers name, dtype, shape and digest in name order, length-prefixed.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from storage.errors import IntegrityError

_TITLE = b"cairn train state 2\n"
CHUNK_BYTES = 8 * 1024 * 1024
"""Part of the format: with another size every digest is another."""
DIGEST_BYTES = hashlib.sha256().digest_size
MOST_DIMENSIONS = 64  # multiplying the lengths of a hostile header with a million dimensions would take hours
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, dtype (as in safetensors) and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise IntegrityError(f"tensor {self.name}: dtype {self.dtype!r} must be one of {sorted(DTYPE_BYTES)}")
        if len(self.shape) > MOST_DIMENSIONS:
            raise IntegrityError(f"tensor {self.name}: {len(self.shape):,} dimensions, at most {MOST_DIMENSIONS}")
        if any(length < 0 for length in self.shape):
            raise IntegrityError(f"tensor {self.name}: shape {self.shape}: no length may be negative")

    @property
    def bytes(self) -> int:
        """The size of all values."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord(TensorSpec):
    """A tensor over a flat buffer of little-endian values, which is not copied."""

    data: memoryview

    def __post_init__(self) -> None:
        TensorSpec.__post_init__(self)
        if self.data.nbytes != self.bytes:
            raise IntegrityError(f"tensor {self.name}: {self.data.nbytes} bytes, its shape and dtype need {self.bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDigest(TensorSpec):
    """A tensor's SHA-256, one for each chunk, joined."""

    chunks: bytes

    def __post_init__(self) -> None:
        TensorSpec.__post_init__(self)
        needed = -(-self.bytes // CHUNK_BYTES) * DIGEST_BYTES
        if len(self.chunks) != needed:
            raise IntegrityError(f"tensor {self.name}: {len(self.chunks)} bytes of digests, its size needs {needed}")

    def digest_at(self, begin: int) -> bytes:
        """Return the digest of the chunk that begins at byte `begin`."""
        first = begin // CHUNK_BYTES * DIGEST_BYTES
        return self.chunks[first : first + DIGEST_BYTES]


def chunks_of(data: memoryview) -> Iterator[memoryview]:
    """Yield the chunks of a tensor's bytes."""
    flat = data.cast("B") if data.nbytes else memoryview(b"")
    return (flat[begin : begin + CHUNK_BYTES] for begin in range(0, flat.nbytes, CHUNK_BYTES))


def with_digests(tensor: TensorSpec, chunks: Iterable[bytes]) -> TensorDigest:
    """Return the tensor with the digests of its chunks."""
    return TensorDigest(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, chunks=b"".join(chunks))


def digest_tensor(record: TensorRecord) -> TensorDigest:
    """Hash a tensor."""
    return with_digests(record, (hashlib.sha256(chunk).digest() for chunk in chunks_of(record.data)))


def state_sha256(tensors: Iterable[TensorRecord | TensorDigest]) -> str:
    """Return the hex digest of a state, equal if and only if the bits are; only tensors without digests are hashed."""
    digest = hashlib.sha256(_TITLE)
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        hashed = tensor if isinstance(tensor, TensorDigest) else digest_tensor(tensor)
        for text in (hashed.name, hashed.dtype, ",".join(map(str, hashed.shape))):
            encoded = text.encode()
            digest.update(struct.pack("<Q", len(encoded)) + encoded)
        digest.update(hashlib.sha256(hashed.chunks).digest())
    return digest.hexdigest()
