"""Functions and files are short, public names documented; a sentence begins with its noun, an amount has one form."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cairn.tasks.text.format import format_quantity

pytestmark = pytest.mark.xdist_group("modules")  # they are parsed once for all tests

FUNCTION_LINES = 50
FILE_LINES = 350
# A name here, as `path:function`, is a debt with a reason beside it.
ALLOWED_LONG_FUNCTIONS: frozenset[str] = frozenset()

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTION))


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    last = function.end_lineno or function.lineno
    docstring = function.body[0] if ast.get_docstring(function, clean=False) else None
    skipped = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return last - function.lineno + 1 - skipped


def test_no_function_is_longer_than_its_ceiling(modules: Mapping[str, ast.Module]) -> None:
    long = {
        f"{path}:{function.name}"
        for path, tree in modules.items()
        for function in functions(tree)
        if lines_without_docstring(function) > FUNCTION_LINES
    }
    assert long == ALLOWED_LONG_FUNCTIONS


def test_no_module_is_longer_than_its_ceiling(root: Path, modules: Mapping[str, ast.Module]) -> None:
    lengths = {path: len((root / path).read_text(encoding="utf-8").splitlines()) for path in modules}
    assert {path: length for path, length in lengths.items() if length >= FILE_LINES} == {}


MOST_WHATS = 10  # of a thousand words
PRONOUN = re.compile(
    r"(?:^|[.!?:]\s+|\n\s*\n\s*|\n\s*[-#>|]+ |\d\. |\| |\*\*)(What|Who|Whose|Whom|Whoever)\b[^.?\n]*\??"
)
CODE = re.compile(r"^```.*?^```|^(?: {4}|\t).*?$", re.MULTILINE | re.DOTALL)


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Every text that stands alone, also below an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def headless(text: str) -> list[str]:
    """Sentences that begin so, without questions."""
    return [found[0] for found in PRONOUN.finditer(text) if not found[0].endswith("?")]


@pytest.fixture(scope="module")
def texts(modules: Mapping[str, ast.Module]) -> Mapping[str, list[str]]:
    """Path from the root → docstrings."""
    return {path: list(docstrings(tree)) for path, tree in modules.items()}


def test_docstrings_have_few_whats(texts: Mapping[str, list[str]]) -> None:
    words = [word.lower() for found in texts.values() for text in found for word in re.findall(r"\w+", text)]
    assert len(words) > 10_000
    assert words.count("what") * 1000 <= MOST_WHATS * len(words)


def test_no_sentence_of_a_docstring_begins_with_a_pronoun_for_a_noun(texts: Mapping[str, list[str]]) -> None:
    begun = {path: [line for text in found for line in headless(text)] for path, found in texts.items()}
    assert {path: found for path, found in begun.items() if found} == {}


def test_no_sentence_of_a_document_begins_with_a_pronoun_for_a_noun(root: Path) -> None:
    paths = [path for part in ("*.md", "docs/**/*.md", "deployments/**/*.md") for path in sorted(root.glob(part))]
    texts = {path.relative_to(root): headless(CODE.sub("", path.read_text(encoding="utf-8"))) for path in paths}
    assert {path: found for path, found in texts.items() if found} == {}


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("It ends. What fails is named.", True),
        ("- **Who reads.** Each.", True),
        ("| What is read | here |", True),
        ("| What writes the manifest? | here |", False),
        ("It says what fails.", False),
    ],
)
def test_a_sentence_is_judged_by_its_first_word(text: str, is_found: bool) -> None:
    assert bool(headless(text)) is is_found


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


SCALED = re.compile(r"\{[^{}]* / (?:1e\d+|_?[A-Z]+BYTES?)[^{}]*\}|\}\s?[kMGT](?:B|FLOP)\b|rich\.filesize")


def test_no_message_scales_an_amount_itself(root: Path, modules: Mapping[str, object]) -> None:
    texts = {path: SCALED.findall((root / path).read_text(encoding="utf-8")) for path in modules}
    assert {path: found for path, found in texts.items() if found} == {}


@pytest.mark.parametrize(
    ("amount", "unit", "shown"),
    [
        (0, "B", "0 B"),
        (11, "B", "11 B"),
        (999, "B", "999 B"),
        (1_000, "B", "1 kB"),
        (4_340_000, "B", "4.34 MB"),
        (400_123_456, "B", "400 MB"),
        (999_999_999, "B", "1 GB"),
        (6.28e12, "B", "6.28 TB"),
        (2e22, "B", "20000 EB"),
        (1.041e11, "FLOP/s", "104 GFLOP/s"),
        (9.89e14, "FLOP/s", "989 TFLOP/s"),
        (0.5, "B/s", "0.5 B/s"),
    ],
)
def test_an_amount_has_three_digits_and_no_exponent(amount: float, unit: str, shown: str) -> None:
    assert format_quantity(amount, unit) == shown
