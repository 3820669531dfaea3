"""Makes glibc keep freed memory, so that the next training step finds it without new pages. Source: mallopt(3)."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAX_INT = 2**31 - 1
LARGEST_POOLED_BYTES = 2**25
"""The most that mallopt accepts. Larger blocks stay mapped one by one; pooling them raised the peak by half."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for this process; return False, changing nothing, where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    options = ((_MMAP_THRESHOLD, LARGEST_POOLED_BYTES), (_TRIM_THRESHOLD, _MAX_INT))
    return all(library.mallopt(option, value) == 1 for option, value in options)
