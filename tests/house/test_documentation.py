import ast
from collections.abc import Iterator, Mapping

DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def public_names(node: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in node.body:
        if isinstance(child, DOCUMENTED) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public_names(child)


def test_every_module_says_what_it_owns(modules: Mapping[str, ast.Module]) -> None:
    assert [path for path, tree in modules.items() if not ast.get_docstring(tree)] == []


def test_every_public_name_is_documented(modules: Mapping[str, ast.Module]) -> None:
    silent = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in modules.items()
        for node in public_names(tree)
        if not ast.get_docstring(node)
    ]
    assert silent == []
