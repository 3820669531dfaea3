"""Objects and files with a known size and SHA-256: every byte is checked before it is used."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cairn.storage.errors import ObjectDamaged, ObjectMissing
from cairn.storage.stores.object_store import MAX_READ_BYTES, READ_CHUNK_BYTES, ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenObject:
    """Size and hex SHA-256 of the bytes that were written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedObject:
    """Key, size and hex SHA-256 that a manifest records for an object."""

    key: str
    bytes: int
    sha256: str


def check_object(store: ObjectStore, expected: ExpectedObject) -> None:
    """Read the whole object; raises ObjectDamaged if it is missing or different."""
    for _ in _verified_chunks(store, expected):
        pass


def find_damage(store: ObjectStore, expected: ExpectedObject) -> ObjectDamaged | None:
    """Read the whole object; returns what is wrong with it, or None."""
    try:
        check_object(store, expected)
    except ObjectDamaged as damage:
        return damage
    return None


def read_verified(store: ObjectStore, expected: ExpectedObject) -> memoryview:
    """Return the object's bytes in one buffer; raises ObjectDamaged if it is missing or different."""
    if expected.bytes > MAX_READ_BYTES and (found := store.size(expected.key)) != expected.bytes:
        raise _wrong_size(expected, f"{found or 0} bytes")  # before memory is allocated for it
    buffer, position = memoryview(bytearray(expected.bytes)), 0
    for chunk in _verified_chunks(store, expected):
        buffer[position : position + len(chunk)] = chunk
        position += len(chunk)
    return buffer.toreadonly()


def save_verified(store: ObjectStore, expected: ExpectedObject, path: Path) -> None:
    """Copy the object into a new file; the file is valid only after this returns."""
    with path.open("xb") as file:
        for chunk in _verified_chunks(store, expected):
            file.write(chunk)


def write_hashed(store: ObjectStore, key: str, chunks: Iterable[bytes | memoryview]) -> WrittenObject:
    """Write chunks as one object; returns size and digest of what was sent."""
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            digest.update(chunk)
            yield chunk

    size_bytes = store.write_stream(key, hashed())
    return WrittenObject(bytes=size_bytes, sha256=digest.hexdigest())


def upload_file(store: ObjectStore, key: str, path: Path) -> WrittenObject:
    """Write a file as one object; returns size and digest of what was sent."""
    with path.open("rb") as file:
        return write_hashed(store, key, iter(partial(file.read, READ_CHUNK_BYTES), b""))


def describe_file(path: Path) -> WrittenObject:
    """Return a file's size and SHA-256; raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return WrittenObject(bytes=file.tell(), sha256=digest.hexdigest())


def _verified_chunks(store: ObjectStore, expected: ExpectedObject) -> Iterator[bytes]:
    digest, size_bytes = hashlib.sha256(), 0
    try:
        for chunk in store.read_chunks(expected.key):
            size_bytes += len(chunk)
            if size_bytes > expected.bytes:
                raise _wrong_size(expected, f"{size_bytes} bytes or more")
            digest.update(chunk)
            yield chunk
    except ObjectMissing as missing:
        raise _wrong_size(expected, "missing") from missing
    if size_bytes != expected.bytes:
        raise _wrong_size(expected, f"{size_bytes} bytes")
    if digest.hexdigest() != expected.sha256:
        raise ObjectDamaged(expected.key, expected=expected.sha256, found=f"sha256 is {digest.hexdigest()}")


def _wrong_size(expected: ExpectedObject, found: str) -> ObjectDamaged:
    return ObjectDamaged(expected.key, expected=f"{expected.bytes} bytes", found=found)
