"""How the C library's allocator treats memory that training frees.

Owns one setting. Refuses to know what is allocated. A step frees and takes the same hundreds of megabytes again; left
to itself, glibc gives large blocks back to the kernel at once, which then clears every page anew in the next step.
Source: mallopt(3).
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MAPPED_BLOCKS = -1, -4
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed for this process; False, and nothing changed, where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    # A threshold for mapping blocks one by one is capped at 32 MiB, where the blocks of a step begin: none is, then.
    return all(
        library.mallopt(option, value) == 1 for option, value in ((_MAPPED_BLOCKS, 0), (_TRIM_THRESHOLD, _LARGEST_INT))
    )
