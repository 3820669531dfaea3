"""A disk of this machine: the meaning of its errors, with advice, and the room that is set aside on it.

That room is small files. A log's entry overwrites one in place when the disk is full, so that no other writer can be
faster in taking the room that the entry needs.
"""

import ctypes
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from cairn.storage.errors import StoreFull, StoreRefused, StoreUnavailable
from cairn.storage.stores import object_store

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
FILES, FILE_BYTES = 16, 32 * 1024
"""More than the entries between two deletions: each evaluation, supersession and deletion is one."""
_CANNOT = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1


def link(file: Path, name: Path) -> None:
    """Give a file this name, unless that is taken; where there are no hard links it loses its own.

    Raises `StoreRefused` where the file system cannot do either without a moment in which both would succeed.
    """
    try:
        os.link(file, name)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        if rename_to_new(file, name):
            return
        problem = "this file system makes no hard links, which the log needs, and no renames that spare a taken name"
        why = f"{error} ({problem}; choose another --store, such as a local disk)"
        raise StoreRefused(f"file://{name}: {why}") from error


def rename_to_new(file: Path, name: Path) -> bool:
    """Rename a file unless the name is taken; False, and nothing done, where that is not one step (renameat2(2))."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or rename(_AT_FDCWD, os.fsencode(file), _AT_FDCWD, os.fsencode(name), _RENAME_NOREPLACE) == 0:
        return rename is not None
    if (number := ctypes.get_errno()) in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(name))


def write_what_fits(file: IO[Any], data: bytes) -> bytes:
    """Write to an unbuffered file, and return what a full disk has no room for."""
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        if error.errno not in FULL:
            raise
    return data


@contextmanager
def convert_errors(problem: str) -> Iterator[None]:
    """Raise a store's error, which begins with `problem`, for each of the operating system's."""
    try:
        yield
    except OSError as error:
        raise store_error(error, problem) from error


def store_error(error: OSError, problem: str) -> StoreUnavailable:
    """Return the error: `StoreRefused` where a retry cannot help, `StoreFull` where a sweep may."""
    if hint := object_store.advice()["disk"].get(errno.errorcode.get(error.errno or 0, "")):
        return StoreRefused(f"{problem}: {error} ({hint})")
    if error.errno in FULL:
        return StoreFull(f"{problem}: {error} (the disk is full; free space and run the same command again)")
    return StoreUnavailable(f"{problem}: {error} (see the cause)")


def fill_reserve(root: Path) -> None:
    """Make the files that are missing, as far as there is room; each gets its name once nobody writes it any more."""
    folder = root / "reserve"
    for file in (folder / f"entry-{number:02}" for number in range(FILES)):
        unfinished = folder / f".{file.name}.{uuid.uuid4().hex}"
        try:
            folder.mkdir(mode=0o775, exist_ok=True)
            if file.exists():
                continue
            with open(unfinished, "xb", opener=open_0664) as made:
                made.write(bytes(FILE_BYTES))
                made.flush()
                os.fsync(made.fileno())
            os.replace(unfinished, file)
        except OSError:
            return
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)


def take_reserve(root: Path, name: Path) -> bool:
    """Give one of the files this name, and nobody else has it; returns False if none is left."""
    folder = root / "reserve"
    for file in () if folder.is_symlink() or not folder.is_dir() else sorted(folder.glob("entry-*")):
        with suppress(FileNotFoundError):  # another process was faster
            found = file.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:  # nothing that has another name
                os.rename(file, name)
                return True
    return False


def open_0664(path: str, flags: int) -> int:
    """Open as `open` asks, but no link; never world-writable, as write access to a store decides what is trained."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o664)
