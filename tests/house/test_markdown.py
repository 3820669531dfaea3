"""What the documents name exists: files, modules, make targets, links between documents."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.house.packages import folder_of

PACKAGES = "cairn|flows|reports|tasks|model|storage|tests|deployments|docs"
FILE = re.compile(rf"(?<![\w/.-])((?:{PACKAGES})/[\w./-]*\w\.(?:py|toml|md|yaml|sh|json|png|sbatch))\b")
FOLDER = re.compile(rf"`((?:{PACKAGES})(?:/[\w-]+)*)/?`")
MODULE = re.compile(rf"(?<![\w/.-])((?:{PACKAGES})(?:\.[a-z_]+)+)\b(?!\()")
TARGET = re.compile(r"`make ([a-z][a-z0-9-]*)|^ {4}make ([a-z][a-z0-9-]*)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:\s]+)\)")
HISTORY = {"CHANGELOG.md"}  # its lines name the files of earlier versions
CEILINGS = {"BENCHMARKS.md": 2500, "CHANGELOG.md": 700}  # words, as `wc -w` counts them; history is git's


@pytest.fixture(scope="module")
def documents(root: Path, tracked: Mapping[str, str]) -> dict[Path, str]:
    return {root / name: text for name, text in tracked.items() if name.endswith(".md") and name not in HISTORY}


def absent(root: Path, documents: dict[Path, str], pattern: re.Pattern[str], base: str = "") -> list[str]:
    return [
        f"{path.relative_to(root)}: {name}"
        for path, text in documents.items()
        for name in dict.fromkeys(pattern.findall(text))
        if not ((path.parent if base == "here" else root) / name).exists()
    ]


def test_every_file_that_a_document_names_exists(root: Path, documents: dict[Path, str]) -> None:
    assert absent(root, documents, FILE) == []


def test_every_folder_that_a_document_names_exists(root: Path, documents: dict[Path, str]) -> None:
    assert absent(root, documents, FOLDER) == []


def test_every_link_between_documents_leads_somewhere(root: Path, documents: dict[Path, str]) -> None:
    assert absent(root, documents, LINK, "here") == []


def test_every_module_that_a_document_names_exists(root: Path, documents: dict[Path, str]) -> None:
    unknown = [
        f"{path.relative_to(root)}: {name}"
        for path, text in documents.items()
        for name in dict.fromkeys(MODULE.findall(text))
        if is_module_like(name) and not leads_to_a_module(root, name)
    ]
    assert unknown == []


def is_module_like(name: str) -> bool:
    """Configuration keys, such as model.n_layer, look like modules of one package, and events like modules."""
    return name.count(".") >= 2 and not name.endswith(".ended")


def leads_to_a_module(root: Path, name: str) -> bool:
    """Whether the name is a module, a package, or a name within a module."""
    parts = folder_of(name).parts
    return (
        any(root.joinpath(*parts[:length]).with_suffix(".py").is_file() for length in (len(parts), len(parts) - 1))
        or root.joinpath(*parts).is_dir()
    )


def test_every_make_target_that_a_document_names_exists(root: Path, documents: dict[Path, str]) -> None:
    targets = set(re.findall(r"^([.a-z0-9-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for text in documents.values() for found in TARGET.findall(text) for name in found if name}
    assert named - targets == set()


UNWRAPPED = re.compile(r"^```.*?^```|^(?: {4}|\||!\[).*?$|^\s*`\S+$", re.MULTILINE | re.DOTALL)


def test_prose_is_wrapped_at_120_characters(root: Path, documents: dict[Path, str]) -> None:
    long = [
        f"{path.relative_to(root)}: {line}"
        for path, text in documents.items()
        for line in UNWRAPPED.sub("", text).splitlines()
        if len(line) > 120 and "reference" not in path.parts
    ]
    assert long == []


QUESTION = re.compile(r"^\| ([^|]*\?) \| (.*) \|$", re.MULTILINE)
ANSWER = re.compile(r"`([\w/]+\.\w+)`(?: \(((?:`\w+`(?:, )?)+)\))?")


def test_every_question_of_a_newcomer_is_answered_in_at_most_two_files_that_have_what_is_named(root: Path) -> None:
    questions = QUESTION.findall((root / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    answers = {question: ANSWER.findall(answer) for question, answer in questions}
    assert len(answers) >= 21
    assert {question: found for question, found in answers.items() if not 1 <= len(found) <= 2} == {}
    absent = [
        (file, name)
        for found in answers.values()
        for file, names in found
        for name in re.findall(r"\w+", names) or [""]
        if not re.search(rf"\b{name}\b", (root / file).read_text(encoding="utf-8"))
    ]
    assert absent == []


@pytest.mark.parametrize(("name", "ceiling"), CEILINGS.items())
def test_a_document_that_could_grow_for_ever_keeps_its_ceiling(root: Path, name: str, ceiling: int) -> None:
    assert len((root / name).read_text(encoding="utf-8").split()) <= ceiling
