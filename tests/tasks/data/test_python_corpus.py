import sys
from pathlib import Path

import pytest

from cairn.tasks.data.corpus import DOCSTRINGS, TOPICS, docstrings_source, module_text, open_python_source
from cairn.tasks.data.document import InvalidCorpus

MODULE = b'''
"""About the module."""
class Box:
    """About the class."""
    def open(self):
        """About the method."""
if True:
    async def wait():
        """About the function: \\d."""
raise SystemExit("the module was run")
'''


def test_topics_are_half_a_megabyte_of_prose() -> None:
    source = open_python_source(TOPICS)
    assert source.bytes > 300_000
    assert len(list(source.documents())) > 50


@pytest.mark.slow  # reads the whole library; quick witness: the module below
def test_docstrings_come_in_the_promised_amount() -> None:
    texts = [document.text for document in open_python_source(DOCSTRINGS).documents()]
    assert 1_000_000 < sum(map(len, texts)) < 4_000_000


@pytest.mark.slow  # reads the whole library; quick witness: the module below
def test_docstrings_are_read_without_importing_their_modules() -> None:
    list(open_python_source(DOCSTRINGS).documents())
    assert not {"turtle", "antigravity", "tkinter.tix"} & set(sys.modules)


def test_every_docstring_stands_under_its_dotted_name() -> None:
    assert module_text(MODULE, "box") == (
        "box\n\nAbout the module.\n\nbox.Box\n\nAbout the class.\n\n"
        "box.Box.open\n\nAbout the method.\n\nbox.wait\n\nAbout the function: \\d."
    )


@pytest.mark.parametrize("content", [b"", b"x = 1", b"not python at all", b"\xff\xfe", b"\x00"])
def test_a_file_without_docstrings_gives_no_text(content: bytes) -> None:
    assert module_text(content, "box") == ""


def test_a_lone_surrogate_in_a_docstring_becomes_a_question_mark() -> None:
    assert module_text(rb'"""odd \ud800 one"""', "box") == "box\n\nodd ? one"


def test_the_same_library_elsewhere_has_the_same_content(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place / "box").mkdir(parents=True)
        (tmp_path / place / "box" / "__init__.py").write_bytes(MODULE)
    one, two = docstrings_source(tmp_path / "one"), docstrings_source(tmp_path / "two")
    assert one.sha256 == two.sha256
    assert list(one.documents()) == list(two.documents())


def test_a_changed_library_has_another_content(tmp_path: Path) -> None:
    (tmp_path / "box.py").write_bytes(MODULE)
    before = docstrings_source(tmp_path)
    (tmp_path / "box.py").write_bytes(MODULE.replace(b"About", b"On"))
    after = docstrings_source(tmp_path)
    assert before.sha256 != after.sha256
    assert "On the class" in next(after.documents()).text


def test_tests_and_installed_packages_are_not_the_library(tmp_path: Path) -> None:
    for folder in ("test", "site-packages", "idlelib"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "box.py").write_bytes(MODULE)
    with pytest.raises(InvalidCorpus, match=f"no source files under {tmp_path}"):
        docstrings_source(tmp_path)


def test_an_unknown_builtin_corpus_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidCorpus, match=r"'python:sources'.*one of python:topics, python:docstrings"):
        open_python_source("python:sources")
