"""A folder for one evaluation, gone when the evaluation is over.

Owns where it lies and that none is left behind: a folder bears the host and process that made it, and whoever makes the
next one removes those of processes that are gone. Refuses to know what is in it.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from storage.logs.entry_log import this_writer


@contextmanager
def evaluation_folder(parent: Path) -> Iterator[Path]:
    """Make a folder under `parent`, by its absolute path, and remove it with all it holds when the block is left."""
    writer = this_writer()
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(parent, writer.host)
    folder = Path(tempfile.mkdtemp(prefix=f"{writer.host}+{writer.pid}+", dir=parent.absolute()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, host: str) -> None:
    for folder in parent.glob(f"{host}+*+*"):
        pid = folder.name.split("+")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
