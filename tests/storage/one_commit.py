"""One commit by a real process (`python -m tests.storage.one_commit FOLDER`), as a run stages and commits.

Prints "ready", waits for a line on stdin, and prints "acknowledged" and the prefix once the commit is acknowledged.
"""

import ctypes
import sys
from pathlib import Path

from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import RetryPolicy
from tests.storage.builders import commit, no_sleep, run_log, stage

_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)


def main(folder: Path) -> None:
    """Stage step 10 of attempt 1 and commit it, with a run's retries."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)  # where only parents may trace
    print("ready", flush=True)
    sys.stdin.readline()
    store, retry = LocalStore(folder), RetryPolicy(tries=5, sleep=no_sleep)
    log = run_log(store)
    staged = retry.call(lambda: stage(store, step=10, attempt=1))
    retry.call(lambda: commit(log, staged))
    print("acknowledged", staged.prefix, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
