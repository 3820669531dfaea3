"""The tests that a document names as `tests/folder/test_file.py::test_name`; `…` is the file that was named before."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

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
