"""Sentences begin with the noun that they are about: not with a what, a who or a whoever."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("modules")  # they are parsed once for all tests

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
