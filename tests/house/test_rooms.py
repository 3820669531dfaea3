"""The house as a graph: rooms are a package's folders and its root, arrows are imports. `-s` prints it."""

import ast
import graphlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from docs.generate.overview_page import Arrows, file_imports, overview_page, room_imports

pytestmark = pytest.mark.xdist_group("modules")  # they are parsed once for all tests


@pytest.fixture(scope="module")
def imports(root: Path) -> Arrows:
    """File → the project's files that it imports."""
    return file_imports(root)


@pytest.fixture(scope="module")
def rooms(imports: Arrows) -> Arrows:
    """Room → the rooms that its files import."""
    return room_imports(imports)


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


def test_the_overview_has_the_rooms_and_quotes_the_chain_as_they_are(root: Path) -> None:
    written = (root / "docs" / "overview.md").read_text(encoding="utf-8")
    assert (root / "flows" / "train_gpt.py").read_text(encoding="utf-8") in written
    assert written == overview_page(root), "run `make docs`"


def test_at_most_one_context_variable_hands_something_past_the_arguments(modules: Mapping[str, ast.Module]) -> None:
    made = [
        path
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ContextVar"
    ]
    assert len(made) <= 1, made
