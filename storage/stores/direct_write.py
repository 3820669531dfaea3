"""Writes long streams past the page cache (O_DIRECT, open(2)).

So a checkpoint costs the processor one copy and the disk is never idle: through the cache, the kernel's own copying
and writing back took as long as hashing. Where a file system cannot do it, the same bytes go through the cache.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable

import numpy as np

BLOCK_BYTES = 4 * 1024 * 1024
"""Enough for one request to keep a disk busy; a multiple of every disk's block."""


def write_stream(descriptor: int, chunks: Iterable[bytes | memoryview]) -> int:
    """Write the chunks to a new file and return how many bytes they are."""
    written_bytes, filled, is_direct = 0, 0, hasattr(os, "O_DIRECT")
    # Memory of its own pages, as direct writes require; a small stream touches little of it.
    block = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
    for chunk in chunks:
        source = np.frombuffer(chunk, np.uint8)
        while source.size:
            count = min(source.size, BLOCK_BYTES - filled)
            block[filled : filled + count] = source[:count]
            filled, source = filled + count, source[count:]
            if filled == BLOCK_BYTES:
                is_direct = is_direct and _write_direct(descriptor, block.data)
                if not is_direct:
                    _write_cached(descriptor, block.data)
                written_bytes, filled = written_bytes + filled, 0
    _write_cached(descriptor, block.data[:filled])
    return written_bytes + filled


def _write_direct(descriptor: int, block: memoryview) -> bool:
    """Write a whole block past the cache; returns False, and has written nothing, if that is not possible here."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        count = os.write(descriptor, block)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    _write_cached(descriptor, block[count:])
    return count == len(block)


def _write_cached(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
