"""The format of a checkpoint: tensors without torch, safetensors shards, the manifest, and `trainer.json`.

A tensor is hashed in chunks of a fixed size, so that several threads can hash it and a part of it can be verified. A
shard is written as a stream, because safetensors' own writer needs all bytes in one piece; what its header must be
follows from the manifest. Source: the safetensors specification (https://github.com/huggingface/safetensors).
"""

import hashlib
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypedDict

import msgspec
import numpy as np

from cairn.storage.errors import IntegrityError
from cairn.storage.stores import codec, object_store

MANIFEST_VERSION = 2
TRAINER = "trainer.json"
_TITLE = b"cairn train state 2\n"
CHUNK_BYTES = 8 * 1024 * 1024
"""Part of the format: with another size every digest is another."""
DIGEST_BYTES = hashlib.sha256().digest_size
MAX_HEADER_BYTES = 64 * 1024 * 1024
MOST_DIMENSIONS = 64  # multiplying the lengths of a hostile header with a million dimensions would take hours
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*\Z")
NUMPY_TYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "BF16": "<u2",
    "I32": "<i4", "U32": "<u4", "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8",
}  # fmt: skip
"""The types of safetensors as NumPy reads them; it has no bfloat16, whose bits it reads as integers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, dtype (as in safetensors) and shape of a tensor; `IntegrityError` for those that no tensor has."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY_TYPES:
            raise IntegrityError(f"tensor {self.name}: dtype {self.dtype!r} must be one of {sorted(NUMPY_TYPES)}")
        if len(self.shape) > MOST_DIMENSIONS:
            raise IntegrityError(f"tensor {self.name}: {len(self.shape):,} dimensions, at most {MOST_DIMENSIONS}")
        if any(length < 0 for length in self.shape):
            raise IntegrityError(f"tensor {self.name}: shape {self.shape}: no length may be negative")

    @property
    def bytes(self) -> int:
        """The size of all values."""
        return math.prod(self.shape) * np.dtype(NUMPY_TYPES[self.dtype]).itemsize


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
        if len(self.chunks) != (needed := -(-self.bytes // CHUNK_BYTES) * DIGEST_BYTES):
            raise IntegrityError(f"tensor {self.name}: {len(self.chunks)} bytes of digests, its size needs {needed}")


def chunks_of(data: memoryview) -> Iterator[memoryview]:
    """Yield the chunks of a tensor's bytes."""
    flat = data.cast("B") if data.nbytes else memoryview(b"")
    return (flat[begin : begin + CHUNK_BYTES] for begin in range(0, flat.nbytes, CHUNK_BYTES))


def with_data(tensor: TensorSpec, data: memoryview) -> TensorRecord:
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


def shard_header(tensors: Sequence[TensorSpec]) -> bytes:
    """Return what stands before the data of a safetensors file with these tensors in the given order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-(8 + len(encoded)) % (object_store.PAGE_BYTES if offset >= object_store.PAGE_BYTES else 8))
    return struct.pack("<Q", len(encoded)) + encoded


def shard_chunks(records: Sequence[TensorRecord]) -> Iterator[memoryview]:
    """Yield the bytes of one safetensors file with `records` in the given order."""
    yield memoryview(shard_header(records))
    for record in records:
        yield from chunks_of(record.data)


class _Version(TypedDict):
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestObject(object_store.WrittenObject):
    """One payload object; `name` is a plain name inside the checkpoint's folder."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(f"object name {self.name!r}: must match {_NAME.pattern}; it may not leave its folder")
        if self.bytes < 0:
            raise ValueError(f"object {self.name}: bytes {self.bytes}: must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestShard(ManifestObject):
    """A shard: its tensors in the order of their data, after the header; `sha256` is over header and chunk digests."""

    header_bytes: int
    tensors: tuple[TensorDigest, ...]

    def __post_init__(self) -> None:
        ManifestObject.__post_init__(self)
        if not 0 <= self.header_bytes <= MAX_HEADER_BYTES + 8:
            raise ValueError(f"object {self.name}: header_bytes {self.header_bytes}: no header has this size")
        needed = self.header_bytes + sum(tensor.bytes for tensor in self.tensors)
        if self.bytes != needed:
            raise ValueError(f"object {self.name}: bytes {self.bytes}: header and tensors need {needed}")

    def placed(self) -> Iterator[tuple[TensorDigest, int]]:
        """Yield each tensor with the byte of the object at which it begins."""
        position = self.header_bytes
        for tensor in self.tensors:
            yield tensor, position
            position += tensor.bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The objects of a checkpoint; the manifest's own SHA-256 identifies the checkpoint in the log."""

    version: int
    run_id: str
    attempt: int
    step: int
    state_sha256: str
    trainer: ManifestObject
    shards: tuple[ManifestShard, ...]

    def __post_init__(self) -> None:
        if self.trainer.name != TRAINER:
            raise ValueError(f"object name {self.trainer.name!r}: the trainer document must be {TRAINER}")
        for names in ([item.name for item in self.objects], [tensor.name for tensor in self.tensors]):
            if len(set(names)) < len(names):
                raise ValueError(f"{max(names, key=names.count)!r} is named twice")

    @property
    def objects(self) -> tuple[ManifestObject, ...]:
        """Every object beside the manifest."""
        return self.trainer, *self.shards

    @property
    def tensors(self) -> tuple[TensorDigest, ...]:
        """The tensors of every shard."""
        return tuple(chain.from_iterable(shard.tensors for shard in self.shards))


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Return the manifest in `data`; raise `IntegrityError` naming `where` if it is malformed or newer."""
    version = codec.decode(data, _Version, where=where)["version"]
    if version > MANIFEST_VERSION:
        raise IntegrityError(f"{where}: version {version} is newer than {MANIFEST_VERSION}; update cairn")
    return codec.decode(data, Manifest, where=where)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerDocument:
    """The step and everything small that the run needs to continue with the same bits."""

    version: int
    step: int
    cursor: int
    learning_rate: float
    versions: Mapping[str, str]
    tensors: tuple[TensorRecord, ...]


def small_tensor(record: TensorRecord) -> TensorRecord:
    """Return the record with a copy of its bytes, which training does not change."""
    return replace(record, data=memoryview(bytes(record.data)))
