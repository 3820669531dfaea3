"""Each wrong wire of the table turns a test of the default suite red; `make test-mutants` tries them all."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.programs.mutation.mutated_copy import ROOT, MutatedCopy
from tests.wiring.wire import Wire, find_part, read_wires

WIRES = read_wires(Path(__file__).with_name("wires.tsv"))
SOME_TESTS_FAILED = 1
"""Pytest's exit code; a mutant that only breaks an import has another one."""


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> MutatedCopy:
    """A copy of the tree, in which one mutant after the other is tried."""
    return MutatedCopy(tmp_path_factory.mktemp("mutants"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
def test_the_mutant_is_caught(wire: Wire, copy: MutatedCopy) -> None:
    mutated = wire.mutate((ROOT / wire.path).read_text(encoding="utf-8")).encode()
    done = copy.run_tests(wire.path, mutated, wire.tests)
    assert done.returncode == SOME_TESTS_FAILED, f"{wire.name} survived: {' '.join(wire.tests)}\n{done.stdout}"


@cache
def parse_file(path: str) -> tuple[str, ast.Module]:
    """Return a file's text and tree."""
    return (text := (ROOT / path).read_text(encoding="utf-8")), ast.parse(text)


def statement_around(part: str, path: str) -> str:
    """Return the statement of a file that holds this part: it alone is read, changed and compiled in a moment."""
    text, tree = parse_file(path)
    found = find_part(tree, part.partition("#")[0])
    if not isinstance(found, ast.FunctionDef | ast.ClassDef):
        return text
    statement = next(item for item in reversed(tree.body) if item.lineno <= found.lineno)
    first = min([statement.lineno, *(item.lineno for item in getattr(statement, "decorator_list", ()))])
    return "\n".join(text.splitlines()[first - 1 : statement.end_lineno])


def test_every_mutant_changes_one_place_of_today_and_is_still_a_program() -> None:
    for wire in WIRES:
        if wire.path.endswith(".py"):
            tree = ast.parse(statement_around(wire.part, wire.path))
            part = find_part(tree, wire.part.partition("#")[0])
            before = ast.dump(part)
            compile(wire.mutate_program(tree), wire.path, "exec")
            assert ast.dump(part) != before, wire.name
        else:
            text = (ROOT / wire.path).read_text(encoding="utf-8")
            assert wire.mutate(text) != text, wire.name


def test_what_is_to_catch_a_mutant_is_in_the_default_suite() -> None:
    named = {test.partition("[")[0] for wire in WIRES for test in wire.tests}
    known = {f"{path}::{name}" for path in {test.partition("::")[0] for test in named} for name in default_tests(path)}
    assert named - known == set()
    assert [wire.name for wire in WIRES if not wire.tests] == []


def test_every_mutant_has_a_name_of_its_own() -> None:
    names = [wire.name for wire in WIRES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("part", "wire", "wrong", "mutated"),
    [
        pytest.param("f", "b", "0", "def f():\n    return g(a, 0, c=d)", id="an expression is replaced"),
        pytest.param("f", "a", "", "def f():\n    return g(b, c=d)", id="an argument is cut out"),
        pytest.param("f", "c=d", "", "def f():\n    return g(a, b)", id="an argument by name is cut out"),
        pytest.param("f", "c=d", "d=c", "def f():\n    return g(a, b, d=c)", id="an argument by name is replaced"),
        pytest.param("f", "return g(a,  b, c = d)", "", "def f():\n    pass", id="a statement is cut out"),
        pytest.param("C.f", "g()", "", "def f():\n        pass", id="a call for its effect is cut out"),
        pytest.param("C.f", "g()", "a(); b()", "def f():\n        a()\n        b()\n", id="a call becomes two"),
        pytest.param("C.h#2", "g()", "0", "def h():\n        g()\n        0", id="the second of two"),
    ],
)
def test_a_wire_is_found_by_what_it_reads_as(part: str, wire: str, wrong: str, mutated: str) -> None:
    text = "def f():\n    return g(\n        a,\n        b,\n        c=d,\n    )\n\nclass C:\n\n"
    text += "    def f():\n        g()\n\n    def h():\n        g()\n        g()\n"
    assert mutated in Wire(name="", path="x.py", part=part, wire=wire, wrong=wrong, tests=()).mutate(text)


@pytest.mark.parametrize(("part", "wire"), [("f", "a"), ("f", "b"), ("f#3", "a")])
def test_a_wire_that_is_not_there_as_often_as_it_says_is_refused(part: str, wire: str) -> None:
    with pytest.raises(ValueError, match="not once in f"):
        Wire(name="", path="x.py", part=part, wire=wire, wrong="0", tests=()).mutate("def f():\n    return a, a, c\n")


def default_tests(path: str) -> set[str]:
    """Return the names of a file's tests that no marker takes out of the default suite."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    marked = [node for node in tree.body if isinstance(node, ast.Assign) and "mark.slow" in ast.unparse(node)]
    slow = {node.name for node in tests for item in node.decorator_list if ast.unparse(item) == "pytest.mark.slow"}
    return set() if marked else {node.name for node in tests} - slow
