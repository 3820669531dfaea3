"""A program that prints whether other programs of its user may read its memory, and the limits of its core file."""

import ctypes
import json
import resource

_GET_DUMPABLE = 3


def show() -> int:
    """Print both as JSON; return the exit code."""
    readable = ctypes.CDLL(None).prctl(_GET_DUMPABLE, 0, 0, 0, 0)
    print(json.dumps([readable, *resource.getrlimit(resource.RLIMIT_CORE)]), flush=True)
    return 0


if __name__ == "__main__":
    show()
    input()
