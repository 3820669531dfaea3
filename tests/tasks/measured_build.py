"""Builds a snapshot on some of the cores and with files listed backwards, and prints its id and the peak of memory.

Run as a program: folder, configuration as JSON, number of cores, and from how many bytes the fast library encodes.
"""

import glob
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from cairn.model.configuration.data import DataConfig
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data import snapshot_build


def main() -> None:
    folder, cores = Path(sys.argv[1]), int(sys.argv[3])
    if sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    listed = glob.glob

    def backwards(*args: Any, **named: Any) -> list[str]:
        return listed(*args, **named)[::-1]

    glob.glob, snapshot_build.FAST_FROM_BYTES = backwards, int(sys.argv[4])
    data = DataConfig.model_validate_json(sys.argv[2])
    made = snapshot_build.build_snapshot(LocalStore(folder / "store"), data, folder, cache_dir=folder / "cache")
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([made.snapshot_id, peak_bytes]))


if __name__ == "__main__":
    main()
