"""The working folder of a snapshot build: a killed build leaves it to the next one of the same recipe."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks.data.document import InvalidCorpus

_ABANDONED_SECONDS = 14 * 24 * 3600.0


@contextmanager
def build_folder(cache_dir: Path | None, recipe_id: str) -> Iterator[Path]:
    """Lock the recipe's folder for this process; a temporary folder without a cache, or if it is locked already.

    The folder is removed after success and after InvalidCorpus, and stays after any other error.
    """
    with ExitStack() as stack:
        if cache_dir is None or not _lock(stack, cache_dir / "snapshots-in-work" / f"{recipe_id}.lock"):
            yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cairn-snapshot-")))
            return
        folder = cache_dir / "snapshots-in-work" / recipe_id
        folder.mkdir(exist_ok=True)
        _remove_abandoned(folder)
        try:
            yield folder
        except InvalidCorpus:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(own: Path) -> None:
    for lock in own.parent.glob("*.lock"):
        folder = lock.with_suffix("")
        if folder == own or not folder.is_dir() or time.time() - lock.stat().st_mtime < _ABANDONED_SECONDS:
            continue
        with ExitStack() as stack:
            if _lock(stack, lock):
                shutil.rmtree(folder, ignore_errors=True)


def _lock(stack: ExitStack, path: Path) -> bool:
    """Lock the file while `stack` is open, and set its time; the system unlocks it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.utime(descriptor)
    return True
