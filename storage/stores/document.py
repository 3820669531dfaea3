"""How records become JSON and come back: sorted keys, indented, strict types, one place.

Owns the encoding (RFC 8259, times per RFC 3339). Refuses to know what any record means.
"""

import hashlib
from typing import Any, TypeVar

import msgspec

from storage.errors import IntegrityError, StorageError

T = TypeVar("T")
MAX_DOCUMENT_BYTES = 16 * 1024 * 1024


def encode(record: object) -> bytes:
    """Return the record as sorted, indented JSON that `cat` shows well; equal records give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1) + b"\n"


def decode(data: bytes, record_type: type[T], *, where: str) -> T:
    """Return the record in `data`, or raise `IntegrityError` naming `where` and the offending field."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise IntegrityError(f"{where}: {len(data)} bytes, at most {MAX_DOCUMENT_BYTES} are read")
    try:
        return msgspec.json.decode(data, type=record_type)
    except (msgspec.DecodeError, RecursionError, ValueError, StorageError) as error:
        raise IntegrityError(f"{where}: not a valid {record_type.__name__}: {error}") from error


def converted(value: object, record_type: type[T], *, where: str) -> T:
    """Return a value of plain JSON types as a record, or raise `IntegrityError` naming `where` and the field."""
    try:
        return msgspec.convert(value, record_type)
    except (msgspec.ValidationError, RecursionError, ValueError, StorageError) as error:
        raise IntegrityError(f"{where}: not a valid {record_type.__name__}: {error}") from error


def builtins(record: object) -> Any:
    """Return the record as plain JSON types, for printing."""
    return msgspec.to_builtins(record, str_keys=True)


def sha256(data: bytes) -> str:
    """Return the hex SHA-256 of the bytes."""
    return hashlib.sha256(data).hexdigest()
