"""Each wrong wire of the list turns a test of the default suite red; `make test-mutants` tries them all."""

import ast

import pytest

from tests.programs.mutation.mutated_copy import ROOT, MutatedCopy
from tests.wiring.mutant import Mutant
from tests.wiring.mutants import LEAST, MUTANTS

SOME_TESTS_FAILED = 1
"""Pytest's exit code; a mutant that only breaks an import has another one."""


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> MutatedCopy:
    """A copy of the tree, in which one mutant after the other is tried."""
    return MutatedCopy(tmp_path_factory.mktemp("mutants"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught(mutant: Mutant, copy: MutatedCopy) -> None:
    mutated = mutant.mutate((ROOT / mutant.path).read_text(encoding="utf-8")).encode()
    done = copy.run_tests(mutant.path, mutated, mutant.tests)
    assert done.returncode == SOME_TESTS_FAILED, f"{mutant.name} survived: {' '.join(mutant.tests)}\n{done.stdout}"


def test_every_mutant_changes_one_place_of_today_and_is_still_a_program() -> None:
    for mutant in MUTANTS:
        text = (ROOT / mutant.path).read_text(encoding="utf-8")
        mutated = mutant.mutate(text)
        assert mutated != text, mutant.name
        if mutant.path.endswith(".py"):
            compile(mutated, mutant.path, "exec")


def test_what_is_to_catch_a_mutant_is_in_the_default_suite() -> None:
    named = {test.partition("[")[0] for mutant in MUTANTS for test in mutant.tests}
    known = {f"{path}::{name}" for path in {test.partition("::")[0] for test in named} for name in default_tests(path)}
    assert named - known == set()
    assert [mutant.name for mutant in MUTANTS if not mutant.tests] == []


def test_the_list_has_its_length_and_every_mutant_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) >= LEAST and len(set(names)) == len(names)


def default_tests(path: str) -> set[str]:
    """Return the names of a file's tests that no marker takes out of the default suite."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    marked = [node for node in tree.body if isinstance(node, ast.Assign) and "mark.slow" in ast.unparse(node)]
    slow = {node.name for node in tests for item in node.decorator_list if ast.unparse(item) == "pytest.mark.slow"}
    return set() if marked else {node.name for node in tests} - slow
