"""The meaning of an operating system's error for a store on its disk: refused, full or unavailable; with what to do."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from cairn.storage.errors import StoreFull, StoreRefused, StoreUnavailable

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


def link(file: Path, name: Path) -> None:
    """Give a file another name, unless that is taken; raises `StoreRefused` where the file system has no hard links."""
    try:
        os.link(file, name)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        rule = "this file system makes no hard links, which the log needs; choose another --store, such as a local disk"
        raise StoreRefused(f"file://{name}: {error} ({rule})") from error


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
    refused = {
        errno.EACCES: "make it writable or choose another --store",
        errno.EROFS: "the file system is read-only; choose another --store",
        errno.ENOTDIR: "a file stands where the store's folder should be; choose another --store",
        errno.EEXIST: "a file stands where the store's folder should be; choose another --store",
        errno.EPERM: "the file system forbids it, as for an immutable folder; choose another --store",
        errno.EFBIG: "no file may grow that large here; raise `ulimit -f`, or choose another --store",
    }
    if hint := refused.get(error.errno or 0):
        return StoreRefused(f"{problem}: {error} ({hint})")
    if error.errno in FULL:
        return StoreFull(f"{problem}: {error} (the disk is full; free space and run the same command again)")
    return StoreUnavailable(f"{problem}: {error} (see the cause)")
