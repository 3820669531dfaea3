"""A wrong wire: one small mistake in a part of the product, and the few tests of the default suite that must fail.

The wires are the rows of `wires.tsv`. A part is a function or class of a file, or all of it. A wire is an expression,
an argument by name, or statements, which the part holds once, however they are wrapped (`part#2`: the second of
several); `wrong` stands in its place, and where that is empty the wire is cut out. In a file that is no Python, a wire
is a piece of its text.
"""

import ast
import csv
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """In this part of the file at `path`, `wire` becomes `wrong`; at least one of `tests` must fail."""

    name: str
    path: str
    part: str
    wire: str
    wrong: str
    tests: tuple[str, ...]

    def mutate(self, text: str) -> str:
        """Return the file with the wrong wire; raises ValueError unless the part holds the wire as often as it says."""
        if not self.path.endswith(".py"):
            self._check(text.count(self.wire) == 1)
            return text.replace(self.wire, self.wrong)
        return ast.unparse(self.mutate_program(ast.parse(text)))

    def mutate_program(self, tree: ast.Module) -> ast.Module:
        """Change the tree of a Python file, or of its statement that holds the part, and return it; raises as above."""
        part, _, which = self.part.partition("#")
        change = _Change(self.wire, self.wrong, which=int(which or 1))
        change.visit(find_part(tree, part))
        self._check(change.count >= int(which) if which else change.count == 1)
        return tree

    def _check(self, holds: bool) -> None:
        if not holds:
            where = f"{self.part} of {self.path}" if self.part else self.path
            raise ValueError(f"{self.name}: not once in {where}, or not as often as it says: {self.wire}")


def read_wires(path: Path) -> tuple[Wire, ...]:
    """Return the rows of a table: name, file and part, wire, wrong, and the tests."""
    with path.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    found = []
    for name, place, wire, wrong, *tests in rows:
        path_, _, part = place.partition(":")
        found.append(Wire(name=name, path=path_, part=part, wire=wire, wrong=wrong, tests=tuple(tests)))
    return tuple(found)


class _Change(ast.NodeTransformer):
    """Puts the wrong reading where the wire stands for the `which`th time, and counts how often it stands there."""

    def __init__(self, wire: str, wrong: str, *, which: int) -> None:
        self.count, self._which = 0, which
        self._nodes = {ast.dump(node): type(node) for node in _expressions(wire)}
        self._wrong = {isinstance(node, ast.keyword): node for node in _expressions(wrong)}
        statements = _statements(wire)
        is_expression = len(statements) == 1 and isinstance(statements[0], ast.Expr)
        self._statements = [] if is_expression else [ast.dump(statement) for statement in statements]
        self._wrong_statements: list[ast.AST] = [*_statements(wrong)]

    def visit(self, node: ast.AST) -> Any:
        found = node.value if isinstance(node, ast.Expr) else node
        if type(found) in self._nodes.values() and ast.dump(found) in self._nodes:
            self.count += 1
            if self.count == self._which:
                is_statement = isinstance(node, ast.Expr)
                return self._wrong_statements if is_statement else self._wrong.get(isinstance(node, ast.keyword))
            return node
        for name in ("body", "orelse", "finalbody"):
            if self._statements and isinstance(held := getattr(node, name, None), list):
                self._change_statements(held)
        self.generic_visit(node)
        if getattr(node, "body", None) == []:
            node.body = [ast.copy_location(ast.Pass(), node)]  # type: ignore[attr-defined]
        return node

    def _change_statements(self, held: list[ast.AST]) -> None:
        size = len(self._statements)
        for index in range(len(held) - size, -1, -1):
            if [ast.dump(statement) for statement in held[index : index + size]] == self._statements:
                self.count += 1
                if self.count == self._which:
                    held[index : index + size] = self._wrong_statements


def _expressions(cell: str) -> Iterator[ast.AST]:
    """Yield a cell as an expression and as an argument by name, as far as it reads so."""
    for form in ("({})", "f({})") if cell else ():
        with suppress(SyntaxError):
            read = ast.parse(form.format(cell), mode="eval").body
            yield from [read] if form == "({})" else read.keywords if isinstance(read, ast.Call) else []


def _statements(cell: str) -> list[ast.stmt]:
    """Return a cell as statements, if it reads so; an expression is one where it stands for its effect."""
    with suppress(SyntaxError):
        return ast.parse(cell).body
    return []


def find_part(tree: ast.Module, name: str) -> ast.AST:
    """Return the function or class, by its name and those around it."""
    part: ast.AST = tree
    for step in filter(None, name.split(".")):
        part = next(node for node in ast.walk(part) if getattr(node, "name", None) == step)
    return part
