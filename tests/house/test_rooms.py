"""The house as a graph: rooms are a package's folders and its root, arrows are imports. `-s` prints it."""

import ast
import graphlib
from collections import defaultdict
from collections.abc import Mapping

import pytest

from tests.house.packages import folder_of, module_of

Arrows = dict[str, set[str]]


def room(module: str) -> str:
    """The folder of a module; a package's root is one room, but for `errors`, which every room may import."""
    parts = folder_of(module).parts
    return ".".join(parts[:2]) if len(parts) > 2 or parts[-1] == "errors" else f"{parts[0]} (root)"


@pytest.fixture(scope="module")
def imports(modules: Mapping[str, ast.Module]) -> Arrows:
    """Module → the project's modules that it imports, also inside functions."""
    known = {module_of(path) for path in modules if not path.endswith("__init__.py")}
    arrows: Arrows = defaultdict(set)
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
                arrows[module_of(path)] |= (targets & known) - {module_of(path)}
    return arrows


@pytest.fixture(scope="module")
def rooms(imports: Arrows) -> Arrows:
    """Room → the rooms that its files import."""
    arrows: Arrows = defaultdict(set)
    for module, targets in imports.items():
        arrows[room(module)] |= {room(target) for target in targets} - {room(module)}
    return arrows


def test_no_two_rooms_import_each_other(rooms: Arrows) -> None:
    print()
    for name in sorted(rooms):
        print(f"{name:24} → {', '.join(sorted(rooms[name])) or 'nothing'}")
    assert {tuple(sorted((a, b))) for a in rooms for b in rooms[a] if a in rooms.get(b, ())} == set()


def test_rooms_form_storeys(rooms: Arrows) -> None:
    graphlib.TopologicalSorter(rooms).prepare()


def test_no_files_import_each_other_in_a_circle(imports: Arrows) -> None:
    graphlib.TopologicalSorter(imports).prepare()


def test_every_room_says_in_a_sentence_what_it_is(modules: Mapping[str, ast.Module]) -> None:
    packages = {path: tree for path, tree in modules.items() if path.endswith("__init__.py")}
    assert [path for path, tree in packages.items() if len(ast.get_docstring(tree) or "") < 20] == []
