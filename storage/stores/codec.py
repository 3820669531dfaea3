"""Records as JSON (RFC 8259; times per RFC 3339) and back: sorted keys, indented, strict types."""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from cairn.storage.errors import IntegrityError, StorageError

T = TypeVar("T")
MAX_DOCUMENT_BYTES = 16 * 1024 * 1024


def encode(record: object, *, hook: Callable[[object], object] | None = None) -> bytes:
    """Return the record as sorted, indented JSON; equal records give equal bytes. `hook` encodes other types."""
    return msgspec.json.format(msgspec.json.encode(record, order="sorted", enc_hook=hook), indent=1) + b"\n"


def decode(data: bytes, record_type: type[T], *, where: str, hook: Callable[[type, Any], object] | None = None) -> T:
    """Return the record in `data`; raises IntegrityError naming `where` and the invalid field."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise IntegrityError(f"{where}: {len(data)} bytes, at most {MAX_DOCUMENT_BYTES} are read")
    try:
        return msgspec.json.decode(data, type=record_type, dec_hook=hook)
    except (msgspec.DecodeError, RecursionError, ValueError, StorageError) as error:
        raise IntegrityError(f"{where}: not a valid {record_type.__name__}: {error}") from error


def convert(value: object, record_type: type[T], *, where: str) -> T:
    """Return a value of plain JSON types as a record; raises IntegrityError naming `where` and the invalid field."""
    try:
        return msgspec.convert(value, record_type)
    except (msgspec.ValidationError, RecursionError, ValueError, StorageError) as error:
        raise IntegrityError(f"{where}: not a valid {record_type.__name__}: {error}") from error


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections under their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def stored_value(document: Mapping[str, Any], section: str, key: str, kind: type[T]) -> T | None:
    """Return a value of this kind, None where another version's configuration has none; an int is a float too."""
    value = stored_section(document, section).get(key)
    if kind is float and isinstance(value, int) and abs(value) <= sys.float_info.max:
        value = float(value)
    return value if isinstance(value, kind) else None


def stored_section(document: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Return a section, empty where a document of unknown origin has anything else."""
    found = document.get(section)
    return found if isinstance(found, Mapping) else {}


def stored_list(document: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return a list, empty where a document of unknown origin has anything else."""
    found = document.get(key)
    return found if isinstance(found, list | tuple) else ()


def sha256(data: bytes) -> str:
    """Return the hex SHA-256 of the bytes."""
    return hashlib.sha256(data).hexdigest()
