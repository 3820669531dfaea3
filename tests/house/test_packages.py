"""Packages are those that are listed, and what is used of Prefect is public or stands in docs/prefect.md."""

import ast
import re
from collections.abc import Iterator, Mapping
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


PUBLIC = re.compile(
    r"prefect(\.(blocks\.core|client\.orchestration|client\.schemas(\.\w+)?|context|deployments|events(\.actions|"
    r"\.schemas\.automations)?|exceptions|input\.run_input|settings|states|types|utilities\.(callables|urls)))?"
)
"""Modules of Prefect's API reference."""
UNDOCUMENTED = frozenset({"refresh_global_settings_context", "keyset_from_paused_state"})
"""Names of such a module that the reference does not list."""
ROOMS = ("cairn/", "flows/", "reports/", "tasks/")
FOREIGN = ("prefect", "pydantic_settings", "coolname")


def private_uses(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file takes from Prefect's private parts, or from libraries beneath it."""
    taken = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.partition(".")[0] in FOREIGN and "." in one.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FOREIGN:
            names = [one.name for one in node.names]
            taken |= {*names}
            yield from (name for name in names if name in UNDOCUMENTED or not PUBLIC.fullmatch(node.module or ""))
    for node in ast.walk(tree):
        is_theirs = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in taken
        if is_theirs and re.match("_[a-z]", node.attr):
            yield f"{node.value.id}.{node.attr}"


@pytest.fixture(scope="module")
def table(root: Path) -> list[str]:
    lines = (root / "docs/prefect.md").read_text(encoding="utf-8").partition("## Used of Prefect")[2].splitlines()
    return [line for line in lines if line.startswith("| ")][1:]


def test_every_private_use_of_prefect_stands_in_the_documented_table(
    modules: Mapping[str, ast.Module], table: list[str]
) -> None:
    used = {name for path, tree in modules.items() if path.startswith(ROOMS) for name in private_uses(tree)}
    assert len(used) > 8 and {name for name in used if not any(name in line for line in table)} == set()


def test_the_test_that_holds_a_private_use_is_there(root: Path, table: list[str]) -> None:
    named = [re.findall(r"`(tests/[^`]+)`", line.rpartition(" | ")[2]) for line in table]
    assert all(named) and [name for found in named for name in found if not (root / name).is_file()] == []
