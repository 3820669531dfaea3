"""How the C library's allocator treats memory that training frees.

Owns one setting. Refuses to know what is allocated. A step frees and takes the same blocks of some megabytes again;
left to itself, glibc gives many of them back to the kernel, which then clears every page anew in the next step.
Source: mallopt(3).
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_INT = 2**31 - 1
LARGEST_POOLED_BYTES = 2**25
"""As much as mallopt takes. Larger blocks stay mapped one by one: pooled as well, they raised the peak by half."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed for this process; False, and nothing changed, where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    wanted = ((_MMAP_THRESHOLD, LARGEST_POOLED_BYTES), (_TRIM_THRESHOLD, _LARGEST_INT))
    return all(library.mallopt(option, value) == 1 for option, value in wanted)
