import ast
from collections.abc import Iterator, Mapping

import pytest

pytestmark = pytest.mark.xdist_group("modules")  # they are parsed once for all tests

DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def public_names(node: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in node.body:
        if isinstance(child, DOCUMENTED) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public_names(child)


def classes(modules: Mapping[str, ast.Module]) -> Iterator[ast.ClassDef]:
    return (node for tree in modules.values() for node in tree.body if isinstance(node, ast.ClassDef))


def described_by_interfaces(modules: Mapping[str, ast.Module]) -> set[ast.AST]:
    """Return the methods of classes that inherit from one of our protocols, or have all of its methods."""
    bases = {node: {ast.unparse(base).rpartition(".")[2] for base in node.bases} for node in classes(modules)}
    found = set[ast.AST]()
    for protocol in (node for node in bases if "Protocol" in bases[node]):
        wanted = {method.name for method in public_names(protocol)}
        for node in bases:
            own = {method.name: method for method in public_names(node)}
            if node is not protocol and (protocol.name in bases[node] or wanted <= own.keys()):
                found |= {method for name, method in own.items() if name in wanted}
    return found


def test_every_module_says_what_it_owns(modules: Mapping[str, ast.Module]) -> None:
    assert [path for path, tree in modules.items() if not ast.get_docstring(tree)] == []


def test_every_public_name_is_documented_there_or_by_its_interface(modules: Mapping[str, ast.Module]) -> None:
    described = described_by_interfaces(modules)
    silent = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in modules.items()
        for node in public_names(tree)
        if not ast.get_docstring(node) and node not in described
    ]
    assert silent == []
