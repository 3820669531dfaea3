"""Where a store without runs is, and the stores near this folder: the command may be meant for one of them."""

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from glob import escape, glob
from itertools import islice
from pathlib import Path

from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.text.format import format_count

_MOST_ENTRIES = 200
"""Entries of one folder that are looked at."""
_MOST_SHOWN = 5


def describe_no_runs(store: ObjectStore) -> str:
    """Return the place of a store without runs, whether its folder exists, and the stores nearby."""
    if (runs := store.local_path("runs")) is None:
        return f"there are no runs in {store.url}"
    chosen, here = runs.parent, Path.cwd()
    gone = "" if chosen.exists() else ", a folder that does not exist"
    bases = [(here, 2), *((folder, 1) for folder in (*here.parents[:2], chosen.parent))]
    folders = dict.fromkeys(folder for base, levels in bases for folder in _list_folders(base, levels))
    counts = {folder: len(glob(f"{escape(str(folder))}/runs/*/log")) for folder in folders}
    found = [
        f"--store {shlex.quote(os.path.relpath(one))} ({format_count(n, 'run')})" for one, n in counts.items() if n
    ]
    nearby = f"stores nearby: {', '.join(found[:_MOST_SHOWN])}" if found else "`cairn train quickstart` makes the first"
    return f"there are no runs in {chosen}{gone}; {nearby}"


def _list_folders(base: Path, levels: int) -> Iterator[Path]:
    yield base
    with suppress(OSError), os.scandir(base) as entries:
        for entry in islice(entries, _MOST_ENTRIES if levels else 0):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _list_folders(Path(entry.path), levels - 1)
