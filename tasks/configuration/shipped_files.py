"""Files that a bare name means: those of `deployments` in the working directory, then those that came with Cairn."""

import re
from pathlib import Path

CONFIGURATIONS, SUITES = Path("deployments"), Path("deployments/suites")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\Z")


def named_file(text: str, place: Path, *, folder: Path) -> Path:
    """Return the file that `text` means; a path starts at `folder`, and a file there of exactly that name comes first.

    A name that is nowhere is returned as the path it would be.
    """
    path = folder / Path(text).expanduser()
    if not is_name(text) or path.is_file():
        return path
    return next((file for file in _files(place) if file.stem == text), path)


def is_name(text: str) -> bool:
    """Whether `text` is a bare name, without folder and suffix."""
    return _NAME.match(text) is not None


def known_names(place: Path) -> list[str]:
    """Return the names there are."""
    return sorted({file.stem for file in _files(place)})


def _files(place: Path) -> list[Path]:
    folders = [Path.cwd() / place, Path(__file__).parents[2] / place]
    return [file for folder in folders for file in sorted(folder.glob("*.toml"))]
