"""The object store as the run log needs it: whole small objects, create-if-absent, ordered names.

Owns the interface and the rule for keys. Refuses to know where bytes live: `local_store`,
`memory_store` and `remote_store` do. Keys are relative, `/`-separated and never leave the root. Whatever else lies in
a store's place, under a name that is no key, is nobody's object: no listing shows it, no operation touches it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from storage.errors import IntegrityError, StorageError

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@=+-]*\Z")
# A file system takes 255 bytes a name, and a temporary name is 34 longer than its object's; S3 takes 1024 a key.
_MOST_SEGMENT_CHARACTERS = 200
_MOST_KEY_CHARACTERS = 800
MOST_READ_BYTES = 64 * 1024 * 1024
"""What `read` takes into memory at most unless it is told otherwise; documents are limited to less by their codec."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenObject:
    """What was streamed under a key: its size and the digest of exactly those bytes."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedWrite:
    """Bytes of a write that never became an object: a temporary file, or the parts of a multipart upload.

    `token` is the store's own name for it; `age_seconds` is by the store's clock.
    """

    key: str
    bytes: int
    age_seconds: float
    token: str


class ObjectStore(Protocol):
    """A folder of immutable objects with a create that excludes.

    Every method raises `StoreUnavailable` when the store did not answer cleanly, `StoreRefused` where asking again
    cannot help.
    """

    @property
    def url(self) -> str:
        """Where this store is, without credentials."""
        ...

    def read(self, key: str, *, at_most_bytes: int = MOST_READ_BYTES) -> bytes:
        """Return the object's bytes; raise `ObjectMissing` where there is none, `IntegrityError` where it is larger."""
        ...

    def read_chunks(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes piece by piece, a few MB each; `ObjectMissing` comes with the first one."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Create the object only if absent: True when this call made it, False when one was there."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite; for objects that are no record, such as heartbeats and caches."""
        ...

    def write_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> WrittenObject:
        """Upload chunks as one object, hashing on the way; nothing is visible before the last one."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """Return all keys under the folder `prefix`, sorted."""
        ...

    def folders(self, prefix: str) -> list[str]:
        """Return the keys of the folders directly under the folder `prefix`, sorted; objects in them are not listed."""
        ...

    def first(self, prefix: str) -> str | None:
        """Return the smallest key directly under the folder `prefix`, in one request where the store can."""
        ...

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None where there is no object."""
        ...

    def delete(self, key: str) -> None:
        """Delete the object; deleting what is not there is no error."""
        ...

    def unfinished(self, prefix: str) -> list[UnfinishedWrite]:
        """Return what writers that died or still write have left under the folder `prefix`, sorted by key."""
        ...

    def discard(self, write: UnfinishedWrite) -> None:
        """Throw an unfinished write away; one that is gone or finished meanwhile is no error, its object stays."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Return the file behind the key where the store is this machine's disk, else None."""
        ...


def checked_key(key: str) -> str:
    """Return the key unchanged, or raise `StorageError` where it could leave the store's root or fits no store."""
    segments = key.split("/")
    if not all(map(_SEGMENT.match, segments)):
        raise StorageError(f"key {_shown(key)}: each segment must match {_SEGMENT.pattern} (no '..', no absolute path)")
    if len(key) > _MOST_KEY_CHARACTERS or max(map(len, segments)) > _MOST_SEGMENT_CHARACTERS:
        raise StorageError(
            f"key {_shown(key)}: at most {_MOST_SEGMENT_CHARACTERS} characters a segment and {_MOST_KEY_CHARACTERS} in "
            "all; choose a shorter name"
        )
    return key


def is_key(name: str) -> bool:
    """Whether a name found in a store's place can be one of its objects or folders."""
    try:
        checked_key(name)
    except StorageError:
        return False
    return True


def larger_than(where: str, at_most_bytes: int) -> IntegrityError:
    """Return the error of an object that is more than its reader takes."""
    return IntegrityError(f"{where}: more than the {at_most_bytes:,} bytes that are read; this is no object of cairn's")


def _shown(key: str) -> str:
    return repr(key) if len(key) <= _MOST_SEGMENT_CHARACTERS else f"{key[:60]!r}… ({len(key):,} characters)"
