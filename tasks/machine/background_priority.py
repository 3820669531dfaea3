"""Work beside training gives way to it: the priority of a background thread.

Owns the number. On Linux niceness belongs to a thread; elsewhere to the whole process, which must keep its own.
Source: setpriority(2), nptl(7).
"""

import os
import sys
import threading

NICENESS = 10
"""A tenth of training's weight where they want the same core, all of it where a core is free."""


def give_way() -> None:
    """Let the calling thread run after those that train; does nothing where only whole processes have a niceness."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
