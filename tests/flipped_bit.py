"""Damage as a disk does it: one bit of a file or of an object is another one."""

from pathlib import Path

from cairn.storage.stores.object_store import ObjectStore


def flipped(content: bytes, at: int | None = None) -> bytes:
    """Return these bytes with a bit of the one in the middle, or at a place, changed."""
    data = bytearray(content)
    data[len(data) // 2 if at is None else at] ^= 1
    return bytes(data)


def flip_file(path: Path, at: int | None = None) -> None:
    """Change a bit of a file."""
    path.write_bytes(flipped(path.read_bytes(), at))


def flip_object(store: ObjectStore, key: str) -> None:
    """Change a bit of an object."""
    store.write(key, flipped(store.read(key)))
