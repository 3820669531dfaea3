"""A disk that is full: within the process, fsync and close find no room beyond so many bytes below a folder."""

import errno
import os
import stat
from pathlib import Path

import pytest


class FullDisk:
    """What is below `root` may have `most_bytes`; more is refused when it is brought to the disk, as NFS does."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.most_bytes, self._fsync = root, 1 << 40, os.fsync
        patch.setattr(os, "fsync", self._find_room)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files there, of one with two names once."""
        found = [file.lstat() for file in self.root.rglob("*")]
        return sum({item.st_ino: item.st_size for item in found if stat.S_ISREG(item.st_mode)}.values())

    def fill(self) -> None:
        """Leave no room from now on."""
        self.most_bytes = self.used_bytes

    def _find_room(self, descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and self.used_bytes > self.most_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(descriptor)
