"""A process of a group that ends with the one that started it, whatever state either is in.

Owns that bond. On Linux the kernel keeps it (prctl(2), PR_SET_PDEATHSIG): even a stopped process is ended. Elsewhere a
thread looks. Refuses to know why the other one ended.
"""

import ctypes
import os
import signal
import sys
import threading
import time

_LOOK_SECONDS = 0.5
_SET_DEATH_SIGNAL = 1


def end_with(parent_pid: int) -> None:
    """Be killed when `parent_pid`, which started this process, is no more; at once if it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    watch_parent(parent_pid)


def watch_parent(parent_pid: int) -> None:
    """Look now and again whether the parent is there, in a thread of its own, and kill this process when it is not."""

    def look() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, name="parent", daemon=True).start()
