"""A stream that hashes what passes through it.

Owns the pairing of reading and hashing, so that what was used is what was hashed. Refuses to know what the bytes are.
"""

import hashlib
from typing import Any, BinaryIO

CHUNK_BYTES = 1 << 20


class HashedStream:
    """Reads forward only from an open binary stream; `sha256` and `bytes` are of everything read so far.

    It has the methods that the standard library's buffered reader and gzip, and pyarrow, ask of a raw stream.
    """

    mode = "rb"

    def __init__(self, inner: BinaryIO) -> None:
        self._inner = inner
        self._digest = hashlib.sha256()
        self.bytes = 0
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes, fewer only where the stream ends."""
        data = self._inner.read(size)
        self._note(data)
        return data

    def readinto(self, target: Any) -> int:
        """Fill ``target`` as far as there are bytes; returns how many."""
        view = memoryview(target).cast("B")
        data = self._inner.read(len(view))
        view[: len(data)] = data
        self._note(data)
        return len(data)

    def sha256_to_end(self) -> str:
        """Read what is left and return the hex digest of the whole stream."""
        while self.read(CHUNK_BYTES):
            pass
        return self._digest.hexdigest()

    def readable(self) -> bool:
        """Say that it reads."""
        return True

    def writable(self) -> bool:
        """Say that it does not write."""
        return False

    def seekable(self) -> bool:
        """Say that it does not seek: a hash knows only one direction."""
        return False

    def flush(self) -> None:
        """Do nothing: there is nothing to write."""

    def close(self) -> None:
        """Mark it closed; the stream below belongs to whoever opened it."""
        self.closed = True

    def _note(self, data: bytes) -> None:
        self._digest.update(data)
        self.bytes += len(data)
