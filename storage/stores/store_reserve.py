"""Room that is set aside on a local disk: small files, each of which becomes a log's entry when the disk is full.

An entry overwrites one in place, so that no other writer can be faster in taking the room that it needs.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

FILES, FILE_BYTES = 16, 32 * 1024
"""More than the entries between two deletions: each evaluation, supersession and deletion is one."""


def fill_reserve(root: Path) -> None:
    """Make the files that are missing, as far as there is room."""
    folder = root / "reserve"
    for file in (folder / f"entry-{number:02}" for number in range(FILES)):
        try:
            folder.mkdir(mode=0o775, exist_ok=True)
            with open(file, "xb", opener=_open_0664) as made:
                made.write(bytes(FILE_BYTES))
                made.flush()
                os.fsync(made.fileno())
        except FileExistsError:
            continue
        except OSError:  # half a file would never be filled
            with suppress(OSError):
                file.unlink()
            return


def take_reserve(root: Path, name: Path) -> bool:
    """Give one of the files this name, and nobody else has it; returns False if none is left."""
    folder = root / "reserve"
    for file in () if folder.is_symlink() or not folder.is_dir() else sorted(folder.iterdir()):
        with suppress(FileNotFoundError):  # another process was faster
            found = file.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:  # nothing that has another name
                os.rename(file, name)
                return True
    return False


def _open_0664(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o664)
