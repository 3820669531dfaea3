"""Builds a snapshot on some of the cores, with files listed backwards; prints id, memory, seconds and bytes of text.

The memory is the peak of all processes of the build together, what they share counted once.
Run as a program: folder, configuration as JSON, number of cores, and from how many bytes the fast library encodes.
"""

import glob
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cairn.model.configuration.data import DataConfig
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data import snapshot_build

_EVERY_SECONDS = 0.25
_peak_bytes = 0


def watch(end: threading.Event) -> None:
    """Keep the greatest sum of memory that was seen."""
    global _peak_bytes
    while not end.wait(_EVERY_SECONDS):
        children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
        _peak_bytes = max(_peak_bytes, sum(map(_memory_bytes, {"self", *children})))


def _memory_bytes(process: str) -> int:
    with suppress(OSError):  # it has ended
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


def main() -> None:
    folder, cores = Path(sys.argv[1]), int(sys.argv[3])
    if sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    listed = glob.glob

    def backwards(*args: Any, **named: Any) -> list[str]:
        return listed(*args, **named)[::-1]

    end = threading.Event()
    watching = threading.Thread(target=watch, args=(end,))
    watching.start()
    glob.glob, snapshot_build.FAST_FROM_BYTES = backwards, int(sys.argv[4])
    data = DataConfig.model_validate_json(sys.argv[2])
    begun = time.perf_counter()
    made = snapshot_build.build_snapshot(LocalStore(folder / "store"), data, folder, cache_dir=folder / "cache")
    seconds = time.perf_counter() - begun
    end.set()
    watching.join()
    print(json.dumps([made.snapshot_id, _peak_bytes, seconds, made.text_bytes]))


if __name__ == "__main__":
    main()
