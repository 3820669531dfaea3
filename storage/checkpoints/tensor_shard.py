"""The safetensors format: an 8-byte little-endian header length, a JSON header, then flat data without holes.

Written as a stream, because the library's writer needs all bytes in one piece; read with every field checked.
Source: the safetensors specification (https://github.com/huggingface/safetensors).
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from storage.checkpoints.tensor_record import TensorRecord, TensorSpec
from storage.errors import IntegrityError

MAX_HEADER_BYTES = 64 * 1024 * 1024


def shard_header(tensors: Sequence[TensorSpec]) -> bytes:
    """Return what stands before the data of a safetensors file with these tensors in the given order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def shard_chunks(records: Sequence[TensorRecord]) -> Iterator[memoryview]:
    """Yield the bytes of one safetensors file with `records` in the given order."""
    yield memoryview(shard_header(records))
    for record in records:
        if record.data.nbytes:
            yield record.data.cast("B")


def parse_shard(data: bytes | memoryview, *, where: str) -> tuple[TensorRecord, ...]:
    """Return the tensors of a safetensors file as views of `data`; `IntegrityError` for anything unsound in it."""
    view = memoryview(data)
    tensors = parse_header(view, total_bytes=len(view), where=where)
    records, position = [], len(view) - sum(tensor.bytes for tensor in tensors)
    for tensor in tensors:
        piece = view[position : position + tensor.bytes]
        records.append(TensorRecord(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, data=piece))
        position += tensor.bytes
    return tuple(records)


def parse_header(begin: bytes | memoryview, *, total_bytes: int, where: str) -> tuple[TensorSpec, ...]:
    """Return the tensors of a safetensors file of `total_bytes` from its `begin`, in the order of their data.

    Raises `IntegrityError` for anything unsound, and unless `begin` holds the whole header.
    """
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
        if end - first != tensors[-1].bytes:
            raise IntegrityError(
                f"{where}: tensor {name}: {end - first} bytes, its shape and dtype need {tensors[-1].bytes}"
            )
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
