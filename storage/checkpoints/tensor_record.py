"""Tensors without torch: the digests of their chunks, `state_sha256` (the same for every sharding), and safetensors.

A tensor is hashed in chunks of a fixed size, so that several threads can hash it and a part of it can be verified.
Written as a stream, because safetensors' own writer needs all bytes in one piece; read with every field checked.
Source: the safetensors specification (https://github.com/huggingface/safetensors).
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from cairn.storage.errors import IntegrityError
from cairn.storage.stores.object_store import PAGE_BYTES

_TITLE = b"cairn train state 2\n"
CHUNK_BYTES = 8 * 1024 * 1024
"""Part of the format: with another size every digest is another."""
DIGEST_BYTES = hashlib.sha256().digest_size
MAX_HEADER_BYTES = 64 * 1024 * 1024
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
        _checked_bytes(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """A tensor over a flat buffer of little-endian values, which is not copied."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.data.nbytes != (needed := _checked_bytes(self)):
            raise IntegrityError(f"tensor {self.name}: {self.data.nbytes} bytes, its shape and dtype need {needed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDigest:
    """A tensor's SHA-256, one for each chunk, joined."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: bytes

    def __post_init__(self) -> None:
        if len(self.chunks) != (needed := -(-self.bytes // CHUNK_BYTES) * DIGEST_BYTES):
            raise IntegrityError(f"tensor {self.name}: {len(self.chunks)} bytes of digests, its size needs {needed}")

    @property
    def bytes(self) -> int:
        """The size of all values."""
        return _checked_bytes(self)


def _checked_bytes(tensor: TensorSpec | TensorRecord | TensorDigest) -> int:
    """Return the size of all values; `IntegrityError` for a dtype or shape that no tensor has."""
    if tensor.dtype not in DTYPE_BYTES:
        raise IntegrityError(f"tensor {tensor.name}: dtype {tensor.dtype!r} must be one of {sorted(DTYPE_BYTES)}")
    if len(tensor.shape) > MOST_DIMENSIONS:
        raise IntegrityError(f"tensor {tensor.name}: {len(tensor.shape):,} dimensions, at most {MOST_DIMENSIONS}")
    if any(length < 0 for length in tensor.shape):
        raise IntegrityError(f"tensor {tensor.name}: shape {tensor.shape}: no length may be negative")
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def chunks_of(data: memoryview) -> Iterator[memoryview]:
    """Yield the chunks of a tensor's bytes."""
    flat = data.cast("B") if data.nbytes else memoryview(b"")
    return (flat[begin : begin + CHUNK_BYTES] for begin in range(0, flat.nbytes, CHUNK_BYTES))


def with_data(tensor: TensorSpec | TensorDigest, data: memoryview) -> TensorRecord:
    """Return the tensor over this buffer."""
    return TensorRecord(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, data=data)


def state_sha256(tensors: Iterable[TensorRecord | TensorDigest]) -> str:
    """Return the hex digest of a state, equal if and only if the bits are; only tensors without digests are hashed."""
    digest = hashlib.sha256(_TITLE)
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        if isinstance(tensor, TensorDigest):
            digests = tensor.chunks
        else:
            digests = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks_of(tensor.data))
        for text in (tensor.name, tensor.dtype, ",".join(map(str, tensor.shape))):
            encoded = text.encode()
            digest.update(struct.pack("<Q", len(encoded)) + encoded)
        digest.update(hashlib.sha256(digests).digest())
    return digest.hexdigest()


def shard_header(tensors: Sequence[TensorSpec | TensorRecord]) -> bytes:
    """Return what stands before the data of a safetensors file with these tensors in the given order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + _checked_bytes(tensor)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-(8 + len(encoded)) % (PAGE_BYTES if offset >= PAGE_BYTES else 8))
    return struct.pack("<Q", len(encoded)) + encoded


def shard_chunks(records: Sequence[TensorRecord]) -> Iterator[memoryview]:
    """Yield the bytes of one safetensors file with `records` in the given order."""
    yield memoryview(shard_header(records))
    for record in records:
        yield from chunks_of(record.data)


def parse_shard(data: bytes | memoryview, *, where: str) -> tuple[TensorRecord, ...]:
    """Return the tensors of a safetensors file as views of `data`; `IntegrityError` for anything unsound in it."""
    view = memoryview(data)
    tensors = parse_header(view, total_bytes=len(view), where=where)
    records, position = [], len(view) - sum(map(_checked_bytes, tensors))
    for tensor in tensors:
        end = position + _checked_bytes(tensor)
        records.append(with_data(tensor, view[position:end]))
        position = end
    return tuple(records)


def parse_header(begin: bytes | memoryview, *, total_bytes: int, where: str) -> tuple[TensorSpec, ...]:
    """Return the tensors of a safetensors file in the order of their data; `IntegrityError` for anything unsound."""
    if len(begin) < 8:
        raise IntegrityError(f"{where}: {len(begin)} bytes are no safetensors file")
    (length,) = struct.unpack("<Q", begin[:8])
    if length > min(MAX_HEADER_BYTES, len(begin) - 8):
        raise IntegrityError(f"{where}: header of {length} bytes does not fit the file or the limit")
    tensors, position = [], 0
    for name, field in _fields(bytes(begin[8 : 8 + length]), where):
        first, end = field.data_offsets
        if first != position or end < position:
            raise IntegrityError(f"{where}: tensor {name}: offsets {field.data_offsets} must begin at {position}")
        try:
            tensors.append(TensorSpec(name=name, dtype=field.dtype, shape=field.shape))
        except IntegrityError as error:
            raise IntegrityError(f"{where}: {error}") from error
        if end - first != (needed := _checked_bytes(tensors[-1])):
            raise IntegrityError(f"{where}: tensor {name}: {end - first} bytes, its shape and dtype need {needed}")
        position = end
    if position != total_bytes - 8 - length:
        raise IntegrityError(f"{where}: {total_bytes - 8 - length - position} bytes belong to no tensor")
    return tuple(tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Field:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _fields(header: bytes, where: str) -> list[tuple[str, _Field]]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        fields = [(name, msgspec.json.decode(value, type=_Field)) for name, value in raw.items()]
        json.loads(header, object_pairs_hook=_each_once)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise IntegrityError(f"{where}: safetensors header is malformed: {error}") from error
    return sorted(fields, key=lambda item: item[1].data_offsets)


def _each_once(pairs: list[tuple[str, object]]) -> None:
    """Refuse duplicate keys: readers differ in which of the two values they use."""
    if len(dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is named twice")
