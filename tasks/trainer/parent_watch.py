"""Ends a process when its parent has ended: on Linux by the kernel (prctl(2), PR_SET_PDEATHSIG), else by polling."""

import ctypes
import os
import signal
import sys
import threading
import time

_POLL_SECONDS = 0.5
_SET_DEATH_SIGNAL = 1


def kill_with_parent(parent_pid: int) -> None:
    """Have this process killed as soon as its parent `parent_pid` has ended, at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    watch_parent(parent_pid)


def watch_parent(parent_pid: int, *, kill_group: bool = False) -> None:
    """Poll in a thread whether the parent still runs; when it does not, kill this process, or the group it leads."""

    def poll() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_POLL_SECONDS)
        if kill_group and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=poll, name="parent", daemon=True).start()
