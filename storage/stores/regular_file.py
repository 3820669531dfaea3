"""Opens the files that a configuration, a store or a command line names: regular ones only, read up to a limit."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MOST_TEXT_BYTES = 16 << 20


class NotRegularFile(OSError):
    """A pipe or a device stands where a file should be."""


def open_file(path: Path | str) -> BufferedReader:
    """Open a file to read it; raises OSError, NotRegularFile for what may be endless or wait for a writer."""
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: Path | str) -> int:
    """Open a file as `open_file` does, without a buffer, which costs a small read a third more."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if stat.S_ISREG(mode):
            return number
    except OSError:
        os.close(number)
        raise
    os.close(number)
    raise NotRegularFile(errno.EINVAL, "a pipe or a device; rule: a regular file", str(path))


def read_file(path: Path | str, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """Return the bytes of a regular file; raises OSError, also for one that is larger."""
    with open_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size  # the system's own files have 0 and an end that nobody knows
        data = b"" if size_bytes > most_bytes else file.read(most_bytes + 1)
    if max(size_bytes, len(data)) > most_bytes:
        raise OSError(errno.EFBIG, f"more than the {most_bytes:,} bytes that are read", str(path))
    return data
