"""The parts of docs/overview.md that are made from the code: the graph of rooms and the quoted chain."""

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

Arrows = Mapping[str, set[str]]
PACKAGES = ("cairn", "flows", "reports", "tasks", "model", "storage")
CHAIN = "flows/train_gpt.py"


def room_of(path: str) -> str:
    """Return the room of a file: its folder, `PACKAGE (root)`, or the `errors` of a package."""
    package, *rest = path.removesuffix(".py").split("/")
    return f"{package}.{rest[0]}" if len(rest) > 1 or rest == ["errors"] else f"{package} (root)"


@functools.cache
def file_imports(root: Path) -> Arrows:
    """Return file → the project's files that it imports, also inside functions."""
    found = (path for package in PACKAGES for path in (root / package).rglob("*.py") if path.name != "__init__.py")
    paths = {_module(path := str(each.relative_to(root))): path for each in found}
    return {path: set(_imported(root / path, paths)) - {path} for path in sorted(paths.values())}


def room_imports(files: Arrows) -> Arrows:
    """Return room → the rooms that its files import."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for path, targets in files.items():
        arrows[room_of(path)] |= {room_of(target) for target in targets} - {room_of(path)}
    return arrows


def overview_page(root: Path) -> str:
    """Return docs/overview.md with the rooms and the chain as the code has them."""
    text = (root / "docs" / "overview.md").read_text(encoding="utf-8")
    chain = (root / CHAIN).read_text(encoding="utf-8")
    graph = "\n".join(_graph(room_imports(file_imports(root))))
    return _put(_put(text, "rooms", f"```mermaid\n{graph}\n```"), CHAIN, f"```python\n{chain}```")


def _put(text: str, name: str, block: str) -> str:
    begin, end = f"<!-- {name}: `make docs` writes this -->\n", "\n<!-- end -->"
    return re.sub(f"{re.escape(begin)}.*?{end}", lambda _: f"{begin}{block}{end}", text, count=1, flags=re.DOTALL)


def _graph(arrows: Arrows) -> Iterator[str]:
    """Yield the lines of a flowchart without `errors`, and without the arrows that a chain of other arrows implies."""
    arrows = {room: {to for to in arrows[room] if not _is_errors(to)} for room in arrows if not _is_errors(room)}
    yield "flowchart TB"
    for package in PACKAGES:
        rooms = sorted(room for room in arrows if room.startswith(package))
        yield from (f"    subgraph {package}", *(f'        {_id(room)}["{_label(room)}"]' for room in rooms), "    end")
    for room, targets in sorted(arrows.items()):
        implied = {far for near in targets for far in _reachable(arrows, near)}
        if direct := sorted(targets - implied):
            yield f"    {_id(room)} --> {' & '.join(map(_id, direct))}"


def _reachable(arrows: Arrows, room: str) -> set[str]:
    return arrows[room].union(*(_reachable(arrows, target) for target in arrows[room]))


def _is_errors(room: str) -> bool:
    return room.endswith(".errors")


def _id(room: str) -> str:
    return re.sub(r"\W+", "_", room).strip("_")


def _label(room: str) -> str:
    return room if room.endswith(")") else room.partition(".")[2]


def _module(path: str) -> str:
    name = path.removesuffix(".py").replace("/", ".")
    return name if name.startswith("cairn.") else f"cairn.{name}"


def _imported(file: Path, paths: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            named = (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            yield from (paths[name] for name in named if name in paths)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(overview_page(page.resolve().parents[1]), encoding="utf-8")
