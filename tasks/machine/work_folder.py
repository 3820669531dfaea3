"""This machine's work folder for caches, spools and the trainers' stderr; it can be deleted at any time."""

import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def work_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder: `CAIRN_CACHE`, else `XDG_CACHE_HOME/cairn`, else `~/.cache/cairn`."""
    if chosen := environment.get("CAIRN_CACHE"):
        return Path(chosen)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cairn"


def trainer_folder(environment: Mapping[str, str], run_id: str) -> Path:
    """Return the folder of a run's spools and its trainers' stderr."""
    return work_folder(environment) / "work" / run_id


def keep_file(path: Path, content: bytes) -> None:
    """Replace the file atomically; a folder that cannot be written costs only what would be remembered."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(content)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
