import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.house.packages import module_of

pytestmark = pytest.mark.xdist_group("modules")  # they are parsed once for all tests

VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "manager", "handler", "misc"})


def test_every_folder_with_an_init_is_a_listed_package(root: Path, packages: tuple[str, ...]) -> None:
    found = {
        module_of(str(init.relative_to(root)))
        for name in ("cairn", "flows", "reports", "tasks", "model", "storage")
        for init in (root / name).rglob("__init__.py")
    }
    assert found == set(packages)


def test_the_command_is_installed_from_cairn(project: dict[str, Any]) -> None:
    assert project["project"]["scripts"] == {"cairn": "cairn.cli.command:main"}


def test_package_inits_hold_only_a_docstring_but_for_the_python_api(modules: Mapping[str, ast.Module]) -> None:
    imported = (node for node in ast.walk(modules["cairn/__init__.py"]) if isinstance(node, ast.ImportFrom))
    names = [str(node.module) for node in imported]
    assert [name for name in names if name.startswith("cairn")] == ["cairn.api"]
    for path, tree in modules.items():
        if path.endswith("__init__.py") and path != "cairn/__init__.py":
            assert len(tree.body) == 1 and ast.get_docstring(tree), f"{path} holds more than a docstring"


def test_no_module_has_a_name_that_says_nothing(modules: Mapping[str, ast.Module]) -> None:
    vague = [path for path in modules if VAGUE_NAMES & set(re.split(r"[/_.]", path))]
    assert vague == []


def test_no_module_reads_or_writes_pickles(modules: Mapping[str, ast.Module]) -> None:
    offenders = [
        f"{path}:{node.lineno}" for path, tree in modules.items() for node in ast.walk(tree) if touches_pickle(node)
    ]
    assert offenders == []


def touches_pickle(node: ast.AST) -> bool:
    pickles = {"pickle", "cloudpickle", "dill", "shelve", "joblib", "marshal"}
    match node:
        case ast.Import(names=names):
            return any(alias.name.split(".")[0] in pickles for alias in names)
        case ast.ImportFrom(module=str(module)):
            return module.split(".")[0] in pickles
        case ast.Attribute(value=ast.Name(id="torch"), attr="save" | "load"):
            return True
        case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
            return True
    return False
