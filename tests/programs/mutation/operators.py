"""Mutation operators: each makes one small mistake of a kind that programmers make, at one place of a file.

The kinds are the usual ones (Offutt et al., "An Experimental Determination of Sufficient Mutant Operators", 1996):
relational, logical, arithmetic and constant replacement, negated conditions, and deleted statements.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+"}
_TURNED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """One place of a file, told by its offsets in bytes, and the text that stands there instead."""

    operator: str
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """Return the file with the mistake in it."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def mistakes_of(source: bytes) -> Iterator[Mistake]:
    """Yield every mistake that the operators make in a file, in its order; none in annotations and docstrings."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.expr | ast.stmt) -> slice:
        end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        return slice(starts[node.lineno - 1] + node.col_offset, end)

    for node in _code(ast.parse(source)):
        for operator, found, text in _changes(node, lambda part: source[place(part)].decode()):
            yield Mistake(operator=operator, start=place(found).start, end=place(found).stop, text=text)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through what is computed."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not is_text:
                yield child
                yield from _code(child)


def _changes(node: ast.AST, text: Callable[[ast.expr], str]) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield the operator, the place that it replaces, and by what; `text` returns how an expression is written."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "negate-condition", test, f"not ({text(test)})"
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield "swap-comparison", node, f"(({text(left)}) {_COMPARED[type(operator)]} ({text(right)}))"
        case ast.BoolOp(op=operator, values=values):
            joined = " or " if isinstance(operator, ast.And) else " and "
            yield "swap-logic", node, f"({joined.join(f'({text(value)})' for value in values)})"
        case ast.BinOp(left=left, op=operator, right=right) if _is_computed(operator, left, right):
            yield "swap-arithmetic", node, f"(({text(left)}) {_COMPUTED[type(operator)]} ({text(right)}))"
        case ast.Constant(value=bool(value)):
            yield "flip-constant", node, repr(not value)
        case ast.Constant(value=int(value)):
            yield "shift-number", node, str(value + 1)
        case ast.Call(func=ast.Name(id=name) as called) if name in _TURNED:
            yield "turn-choice", called, _TURNED[name]
        case ast.Expr(value=ast.Call()):
            yield "drop-call", node, "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return-nothing", value, "None"


def _is_computed(operator: ast.operator, *parts: ast.expr) -> bool:
    """Tell whether numbers are computed, as far as can be seen: not texts joined or filled in."""
    texts = [isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str) for part in parts]
    return type(operator) in _COMPUTED and not any(texts)
