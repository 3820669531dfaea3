"""Builds a snapshot and kills itself, really, when the part with a given number is about to be begun.

Run as a program (`python -m tests.tasks.killed_build`): folder, number of the part, the configuration as JSON, and
perhaps "fast": then the fast library encodes, in a child whose process id is printed before the end.
"""

import os
import signal
import sys
from pathlib import Path

from cairn.model.configuration.data import DataConfig
from cairn.model.data import tokenizer
from cairn.storage.snapshots import token_shard
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.data import snapshot_build, snapshot_writer
from cairn.tasks.data.snapshot_build import BuildProgress, BuildStage, build_snapshot


def main() -> None:
    folder, part = Path(sys.argv[1]), int(sys.argv[2])

    def watch(progress: BuildProgress) -> None:
        parts = len(list((folder / "cache").glob("snapshots-in-work/*/*/part-*.arrow")))
        if (progress.stage is BuildStage.TOKENIZING and parts >= part) or progress.stage is BuildStage.WRITING:
            print(*(path.read_text() for path in Path("/proc/self/task").glob("*/children")), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    if sys.argv[4:] == ["fast"]:
        snapshot_build.FAST_FROM_BYTES = 0
        tokenizer._every_character = lambda: iter(())
    token_shard.DEFAULT_SHARD_TOKENS = 4096
    snapshot_writer.BATCH_BYTES, snapshot_writer.PART_BYTES = 1500, 4000
    build_snapshot(
        LocalStore(folder / "store"),
        DataConfig.model_validate_json(sys.argv[3]),
        folder,
        cache_dir=folder / "cache",
        on_progress=watch,
    )


if __name__ == "__main__":
    main()
