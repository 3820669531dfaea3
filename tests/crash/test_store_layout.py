"""The names that docs/overview.md shows of a store are those that a real run leaves in it."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from tests.crash.training_command import RUN, Command

OVERVIEW = Path(__file__).parents[2] / "docs" / "overview.md"
NOT_LEFT = {"code", "fold", "index", "initial", "parts"}
"""Folders that a short run leaves nothing in: caches, weights and networks that were given, other machines' parts."""


def layout() -> str:
    """Return the indented block of the store: paths, and two spaces before each comment or list of names."""
    return re.search(r"^ {4}<store>/(.*?)\n\n", OVERVIEW.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[1]  # type: ignore[index]


def left_names(folder: Path) -> set[str]:
    """Return the names of all folders and files that the run left, without those of the run, snapshots and aliases."""
    names = {name for path in folder.rglob("*") if path.is_file() for name in path.relative_to(folder).parts}
    return {name for name in names - {RUN, "champion"} if not re.match(r"[0-9a-f]{64}", name)}


def test_every_name_that_a_run_leaves_stands_in_the_layout(undisturbed: Command) -> None:
    shown = {re.sub(r"[0-9]+", "*", word) for word in re.split(r"[\s/]+", layout()) if not word.startswith("<")}
    left = left_names(undisturbed.folder / "store")
    assert {name for name in left if not any(fnmatchcase(name, pattern) for pattern in shown)} == set()


def test_every_folder_of_the_layout_is_left_by_a_run(undisturbed: Command) -> None:
    folders = set(re.findall(r"([a-z][a-z-]*)/", layout()))
    assert folders - NOT_LEFT - left_names(undisturbed.folder / "store") == set()
