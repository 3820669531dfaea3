"""The safetensors format: an 8-byte little-endian header length, a JSON header, then flat data without holes.

Written as a stream, because the library's writer needs all bytes in one piece; read with every field checked.
Source: the safetensors specification (https://github.com/huggingface/safetensors).
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from storage.checkpoints.tensor_record import TensorRecord
from storage.errors import IntegrityError

MAX_HEADER_BYTES = 64 * 1024 * 1024


def shard_chunks(records: Sequence[TensorRecord]) -> Iterator[memoryview]:
    """Yield the bytes of one safetensors file with `records` in the given order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for record in records:
        end = offset + record.data.nbytes
        header[record.name] = {"dtype": record.dtype, "shape": record.shape, "data_offsets": (offset, end)}
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    yield memoryview(struct.pack("<Q", len(encoded)) + encoded)
    for record in records:
        if record.data.nbytes:
            yield record.data.cast("B")


def parse_shard(data: bytes | memoryview, *, where: str) -> tuple[TensorRecord, ...]:
    """Return the tensors of a safetensors file as views of `data`; `IntegrityError` for anything unsound in it."""
    view = memoryview(data)
    if len(view) < 8:
        raise IntegrityError(f"{where}: {len(view)} bytes are no safetensors file")
    (length,) = struct.unpack("<Q", view[:8])
    if length > min(MAX_HEADER_BYTES, len(view) - 8):
        raise IntegrityError(f"{where}: header of {length} bytes does not fit the file or the limit")
    body = view[8 + length :]
    records, position = [], 0
    for name, field in _fields(bytes(view[8 : 8 + length]), where):
        if field.data_offsets[0] != position or field.data_offsets[1] < position:
            raise IntegrityError(f"{where}: tensor {name}: offsets {field.data_offsets} must begin at {position}")
        position = field.data_offsets[1]
        data = body[field.data_offsets[0] : position]
        try:
            records.append(TensorRecord(name=name, dtype=field.dtype, shape=field.shape, data=data))
        except IntegrityError as error:
            raise IntegrityError(f"{where}: {error}") from error
    if position != len(body):
        raise IntegrityError(f"{where}: {len(body) - position} bytes belong to no tensor")
    return tuple(records)


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
