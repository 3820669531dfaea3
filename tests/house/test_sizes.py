import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("modules")  # they are parsed once for all tests

FUNCTION_LINES = 50
FILE_LINES = 350
# A name here, as `path:function`, is a debt with a reason beside it.
ALLOWED_LONG_FUNCTIONS: frozenset[str] = frozenset()

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTION))


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    last = function.end_lineno or function.lineno
    docstring = function.body[0] if ast.get_docstring(function, clean=False) else None
    skipped = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return last - function.lineno + 1 - skipped


def test_no_function_is_longer_than_its_ceiling(modules: Mapping[str, ast.Module]) -> None:
    long = {
        f"{path}:{function.name}"
        for path, tree in modules.items()
        for function in functions(tree)
        if lines_without_docstring(function) > FUNCTION_LINES
    }
    assert long == ALLOWED_LONG_FUNCTIONS


def test_no_module_is_longer_than_its_ceiling(root: Path, modules: Mapping[str, ast.Module]) -> None:
    lengths = {path: len((root / path).read_text(encoding="utf-8").splitlines()) for path in modules}
    assert {path: length for path, length in lengths.items() if length >= FILE_LINES} == {}
