"""SECURITY.md and docs/crash-matrix.md are true: every test that they name exists, and no place is left empty."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

_NAMED = re.compile(r"`(?P<path>tests/[\w/]+(?:\.py)?|…)(?:::(?P<test>\w+))?`")


def named_tests(text: str) -> list[tuple[str, str | None]]:
    """Return path and test of everything named; the test is None where only a file or folder is."""
    found: list[tuple[str, str | None]] = []
    for match in _NAMED.finditer(text):
        path = found[-1][0] if match["path"] == "…" else match["path"]
        found.append((path, match["test"]))
    return found


def absent_tests(root: Path, named: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return what is named and is not there."""
    return [
        f"{path}::{test}" if test else path
        for path, test in named
        if not (root / path).exists() or (test and test not in _functions(root / path))
    ]


@cache
def _functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def rows(root: Path) -> list[str]:
    """Return the lines of the table of promises, without its heading."""
    table = (root / "SECURITY.md").read_text(encoding="utf-8").split("| promise | test |\n|---|---|\n", 1)[1]
    return table.splitlines()


def test_every_test_that_a_promise_names_exists(root: Path) -> None:
    assert len(rows(root)) > 30 and absent_tests(root, named_tests("\n".join(rows(root)))) == []


def test_every_promise_names_a_test(root: Path) -> None:
    assert [row for row in rows(root) if "::test_" not in row.rpartition(" | ")[2]] == []


def test_every_file_of_the_security_tests_shows_a_promise(root: Path) -> None:
    named = {path for path, _ in named_tests("\n".join(rows(root)))}
    files = {str(path.relative_to(root)) for path in (root / "tests" / "security").glob("test_*.py")}
    assert files - named == set()


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
