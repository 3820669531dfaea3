"""docs/crash-matrix.md is true: every test it names exists, and no cell is left to the imagination."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.house.named_tests import absent_tests, named_tests

HEADING = "# Crash matrix"
KEY = re.compile(r"[A-Z]\d{1,2}")
NOT_COVERED, CANNOT_BE = "not covered", "–"


@cache
def matrix(root: Path) -> str:
    """Return the section, without what comes after it."""
    text = (root / "docs" / "crash-matrix.md").read_text(encoding="utf-8")
    return text.split(f"{HEADING}\n", 1)[1]


def tables(section: str) -> list[list[list[str]]]:
    """Return every table as rows of cells, the heading first and the rule left out."""
    found: list[list[list[str]]] = []
    before = ""
    for line in section.splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            if not set(line) <= set("|-: "):
                found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        before = line
    return found


def test_every_test_that_the_crash_matrix_names_exists(root: Path) -> None:
    named = named_tests(matrix(root))
    assert len(named) >= 20
    assert absent_tests(root, named) == []


def test_every_key_of_the_crash_matrix_is_explained_and_every_explanation_used(root: Path) -> None:
    grids = [table for table in tables(matrix(root)) if table[0][0] == "moment" and len(table[0]) > 3]
    if not grids:
        pytest.skip("the matrix is a list, without keys")
    ((heading, *rows),) = grids
    used = {key for row in rows for cell in row[1:] for key in KEY.findall(cell)}
    explained = set(re.findall(r"^- \**([A-Z]\d{1,2})\**:?\s", matrix(root), flags=re.MULTILINE))
    assert used == explained
    short = [row[0] for row in rows if len(row) != len(heading)]
    assert not short, f"rows of another length than the heading: {short}"


def test_every_cell_of_the_crash_matrix_names_a_test_or_says_that_there_is_none(root: Path) -> None:
    grids = [table for table in tables(matrix(root)) if table[0][0] == "moment" and len(table[0]) > 3]
    silent = [
        (row[0], heading)
        for table in grids
        for row in table[1:]
        for heading, cell in zip(table[0][1:], row[1:], strict=True)
        if not (KEY.search(cell) or cell.startswith((NOT_COVERED, CANNOT_BE)))
    ]
    assert not silent, f"cells that say nothing: {silent}"
