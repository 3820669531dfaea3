"""Reading an object that somebody promised: size and SHA-256 are checked on the way in, before a byte is used.

Owns the check. An object that is longer than promised is given up at the first byte too many. Refuses to know who
promised what: manifests of checkpoints and of data snapshots alike.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from storage.errors import IntegrityError, ObjectMissing
from storage.stores.object_store import ObjectStore, WrittenObject

_LOOKED_AT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class PromisedObject:
    """What must lie under a key."""

    key: str
    bytes: int
    sha256: str


def check_object(store: ObjectStore, promised: PromisedObject) -> None:
    """Read the object through and keep nothing; raises `IntegrityError` where it is missing or another."""
    for _ in _verified_chunks(store, promised):
        pass


def read_verified(store: ObjectStore, promised: PromisedObject) -> memoryview:
    """Return the object's bytes in one buffer, in memory once; raises `IntegrityError` where it is another."""
    check_size(store, promised)
    buffer = memoryview(bytearray(promised.bytes))
    read_verified_into(buffer, store, promised)
    return buffer.toreadonly()


def read_verified_into(buffer: memoryview, store: ObjectStore, promised: PromisedObject) -> None:
    """Fill the buffer, which is as long as the object; nothing in it may be used before this has returned."""
    position = 0
    for chunk in _verified_chunks(store, promised):
        buffer[position : position + len(chunk)] = chunk
        position += len(chunk)


def check_size(store: ObjectStore, promised: PromisedObject) -> None:
    """Raise `IntegrityError` where a large object is not as large as promised: no number may make memory."""
    if promised.bytes <= _LOOKED_AT_BYTES:
        return
    found = store.size(promised.key)
    if found != promised.bytes:
        raise IntegrityError(f"{promised.key}: {found or 0} bytes, its manifest says {promised.bytes}")


def save_verified(store: ObjectStore, promised: PromisedObject, path: Path) -> None:
    """Copy the object into a file; the file may be believed only after this has returned."""
    with path.open("xb") as file:
        for chunk in _verified_chunks(store, promised):
            file.write(chunk)


def describe_file(path: Path) -> WrittenObject:
    """Return size and SHA-256 of a file as it lies there; raises FileNotFoundError where there is none."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return WrittenObject(bytes=file.tell(), sha256=digest.hexdigest())


def _verified_chunks(store: ObjectStore, promised: PromisedObject) -> Iterator[bytes]:
    digest, size_bytes = hashlib.sha256(), 0
    try:
        for chunk in store.read_chunks(promised.key):
            size_bytes += len(chunk)
            if size_bytes > promised.bytes:
                raise IntegrityError(f"{promised.key}: more than the {promised.bytes} bytes its manifest says")
            digest.update(chunk)
            yield chunk
    except ObjectMissing as missing:
        raise IntegrityError(f"{promised.key}: missing") from missing
    if size_bytes != promised.bytes:
        raise IntegrityError(f"{promised.key}: {size_bytes} bytes, its manifest says {promised.bytes}")
    if digest.hexdigest() != promised.sha256:
        raise IntegrityError(
            f"{promised.key}: sha256 is {digest.hexdigest()[:12]}…, its manifest says {promised.sha256[:12]}…"
        )
