"""This machine's work folder for caches, spools and the trainers' stderr; it can be deleted at any time."""

from collections.abc import Mapping
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
