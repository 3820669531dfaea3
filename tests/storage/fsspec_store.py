"""A store over an fsspec file system and its own `mode='create'`, which is not atomic: what a probe must find."""

import uuid
from pathlib import Path

import fsspec

from tests.memory_store import MemoryStore


class FsspecStore(MemoryStore):
    """Keeps objects in a new folder of the file system."""

    def __init__(self, scheme: str, folder: Path) -> None:
        super().__init__(scheme)
        self._files = fsspec.filesystem(scheme, skip_instance_cache=True, auto_mkdir=True)
        self._root = f"{folder}/{uuid.uuid4().hex}"

    def create(self, key: str, data: bytes) -> bool:
        try:
            self._files.pipe_file(f"{self._root}/{key}", data, mode="create")
        except FileExistsError:
            return False
        return True

    def write(self, key: str, data: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{key}", data)

    def read(self, key: str, *, at_most_bytes: int = 0) -> bytes:
        data: bytes = self._files.cat_file(f"{self._root}/{key}")
        return data

    def first(self, prefix: str) -> str | None:
        names = self._files.find(f"{self._root}/{prefix}")
        return min((name.removeprefix(f"{self._root}/") for name in names), default=None)

    def delete(self, key: str) -> None:
        self._files.rm_file(f"{self._root}/{key}")
