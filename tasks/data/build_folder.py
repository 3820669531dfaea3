"""The folder a snapshot is made in: kept from a killed try to the next, gone when the work is done.

Owns its place (by the recipe, below a cache folder), who may use it, and its end. Refuses to know what is in it.
Losing it costs time and nothing else.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks.data.document import InvalidCorpus

FORGOTTEN_SECONDS = 14 * 24 * 3600.0


@contextmanager
def build_folder(cache_dir: Path | None, recipe_id: str) -> Iterator[Path]:
    """Lend the recipe's folder to this process alone; a temporary one where there is no cache, or it is lent already.

    Bad text empties it, as it may have been read before it was found to be bad. Whatever else is raised leaves it as
    it is, for the next try.
    """
    with ExitStack() as stack:
        if cache_dir is None or not _lent(stack, cache_dir / "snapshots-in-work" / f"{recipe_id}.lock"):
            yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cairn-snapshot-")))
            return
        folder = cache_dir / "snapshots-in-work" / recipe_id
        folder.mkdir(exist_ok=True)
        _sweep(folder)
        try:
            yield folder
        except InvalidCorpus:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(own: Path) -> None:
    """Remove the folders nobody came back for; a lock's time says when its folder was last lent."""
    for lock in own.parent.glob("*.lock"):
        forgotten = lock.with_suffix("")
        if forgotten == own or not forgotten.is_dir() or time.time() - lock.stat().st_mtime < FORGOTTEN_SECONDS:
            continue
        with ExitStack() as stack:
            if _lent(stack, lock):
                shutil.rmtree(forgotten, ignore_errors=True)


def _lent(stack: ExitStack, path: Path) -> bool:
    """Lock the file for as long as ``stack`` is open; the system frees it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.utime(descriptor)
    return True
